"""The embedded data sets: real files, written once on this machine, from data inside installed packages."""
