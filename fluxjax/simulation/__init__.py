"""A cluster in virtual time: engines, hardware, work and faults that the real coordinator can be run against."""
