"""Indexes whose items lie in a database: PostgreSQL with pgvector, or Milvus.

The database has ids, vectors, labels, metadata, stamps and thumbnails; searches, filters and changes by id are its
work. The folder of the index has what belongs to the model: the manifest, class centres with their calibration, and
the map. Any number of machines that have this folder serve the index.

| file | what |
|---|---|
| `database.py` | what a store asks of a database |
| `remote_store.py` | the store: rows, numbers that are gone, facts, the map |
| `settings.py` | the settings of both engines |
| `postgres.py`, `postgres_session.py` | PostgreSQL: connections and errors; statements |
| `milvus.py`, `milvus_session.py` | Milvus: the client and its errors; requests |
"""
