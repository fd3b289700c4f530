"""Moves a rank's masters and payloads to where its anchors lie, and back."""
