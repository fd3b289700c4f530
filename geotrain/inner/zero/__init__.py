"""ZeRO-1 that communicates while backward and forward compute."""
