"""Several processes that train together, one a host: process 0 decides, the others do what it tells them."""
