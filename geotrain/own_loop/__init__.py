"""Puts a loop of the user's own into the outer loop: any torch module, without GeoTrain's trainer."""
