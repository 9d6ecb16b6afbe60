"""How long a response will get: the predictor, the regression behind it, and unfinished responses."""
