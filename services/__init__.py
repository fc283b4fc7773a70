"""The processes of a run. Each imports `common`; none imports another."""
