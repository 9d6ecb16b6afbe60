"""Several processes that train together. Process 0 decides, and the other processes carry out its orders."""
