"""Checks that span sections: a file for each thing that a run may have, read where a run has it."""
