"""Several processes that train together, one a host: process 0 decides, the other processes carry out its orders."""
