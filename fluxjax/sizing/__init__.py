"""What a run needs of each device, found out before it runs: its programs compiled without data, weights or GPUs."""
