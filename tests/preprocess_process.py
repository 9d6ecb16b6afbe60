"""A preprocessor of plain stores: `preprocess_process.py SETTINGS FLAGS...`; SETTINGS is one JSON object."""

import json
import os
import sys

import flight_cases

from fluxjax import preprocess
from fluxjax.data import flight_server, flight_wire

SETTINGS = json.loads(sys.argv[1])
if "protocol" in SETTINGS:  # of another release
    flight_wire.PROTOCOL = flight_server.PROTOCOL = SETTINGS["protocol"]
options = preprocess.parse(["--workers=2", *sys.argv[2:]])
preprocess.serve(options, lambda settings: flight_cases.PlainStore(settings, SETTINGS.get("slow", 0.0)))
os._exit(0)
