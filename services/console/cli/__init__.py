"""The command line, one file for each family of commands, and the options that they share."""
