"""The command lines, and the options that they share."""
