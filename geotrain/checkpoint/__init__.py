"""A worker's optimizer state on disk, by canonical address, so that it can be loaded in any other parallel layout.

`<folder>/<tag>/` holds one safetensors file for each rank, with the moments of the shards that the rank pushes and
their addresses in the file's metadata, and a `manifest.json` with the length and the checksum of every file. All is
written to a temporary folder that is renamed at the end, so a checkpoint appears whole or not at all.

The worker's hosts may share the file system or not. Where they do not, each host's folder holds the manifest and the
files of its own ranks. These then hold all shards of their rank, also those that another rank pushes, so that a rank
needs no file but its own: such a checkpoint can be loaded where every rank has the place in the layout, and the host,
that it had. Of the ranks that see the same folder, the lowest leads: it makes folders and renames them. Whether two
ranks see the same folder is tried out, with a file.

`state.py` collects what is saved, `folders.py` writes a checkpoint's folder whole, `saving.py` copies the one and
does the other in the background, `loading.py` finds the newest whole one and reads it.
"""
