"""`python -m geotrain` is `geotrain`."""

from geotrain.commands.cli import main

main()
