"""The embedded data sets: real files made once, on this machine, from data inside installed packages."""
