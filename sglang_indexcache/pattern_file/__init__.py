"""Pattern files: their content, their names, and the folders and places that they come from."""
