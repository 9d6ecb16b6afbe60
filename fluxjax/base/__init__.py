"""The base of all rooms: the data of a step, errors that a user can mend, worker processes, the timeline."""
