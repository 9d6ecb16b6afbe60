"""Several processes that train together, one on each host. Process 0 decides, and the other processes carry out its
orders."""
