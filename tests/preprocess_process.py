"""A preprocessor of plain stores: `preprocess_process.py SETTINGS FLAGS...`; SETTINGS is one JSON object."""

import json
import os
import pathlib
import sys

SETTINGS = json.loads(sys.argv[1])
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import flight_cases  # noqa: E402

from fluxjax import preprocess  # noqa: E402
from fluxjax.data import flight_server, flight_wire  # noqa: E402

if "protocol" in SETTINGS:  # of another release
    flight_wire.PROTOCOL = flight_server.PROTOCOL = SETTINGS["protocol"]
options = preprocess.parse(["--workers=2", *sys.argv[2:]])
preprocess.serve(options, lambda settings: flight_cases.PlainStore(settings, SETTINGS.get("slow", 0.0)))
os._exit(0)
