"""How a rank's masters and payloads get to where its anchors lie, and back."""
