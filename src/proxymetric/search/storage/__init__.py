"""What lies in the folder of an index: vectors and thumbnails that only grow, items in SQLite, and a log of changes.

| file | what | how it changes |
|---|---|---|
| `manifest.json` | facts, how much of each file belongs to the index, a checksum | replaced as a change's last step |
| `vectors-N.*`, `thumbnails-N.bin` | a row for each vector, the pictures | grow; written anew by `compact` |
| `items-N.sqlite`, `columns-N.int32` | ids, labels, metadata; columns as codes for filters | written anew at a merge |
| `log-N.bin` | the changes since then | grows; a merge begins a new one |
| `map-N.npy`, `engine-N.*` | the map and the graph of an engine | made anew by `renew` |

A change costs what it is: it appends its vectors, its pictures and one entry of the log, and replaces the manifest. A
reader maps the part of each file that its manifest names, so that no later change is visible to it, and it needs to
write nothing. What a killed process appended is not named by the manifest, and the next writer cuts it off.
"""
