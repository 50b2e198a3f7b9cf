"""Tables and figures of the papers, one file each, and the runner behind `overt reproduce`."""
