"""Statements: one reading or one change of an index in PostgreSQL, and conditions as SQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import ORDERS, Condition, comparable, date_of, key_of, microseconds, number_of
from proxymetric.search.remote.database import Facts
from proxymetric.search.searching import Ranked
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Edit

FACTS_TABLE, GAPS_TABLE, PREFIX = "proxymetric_indexes", "proxymetric_gaps", "proxymetric"
GRAPH_FROM = 10_000
"""items from which a graph (HNSW) is built; of fewer all vectors are compared"""
GROWN = 2.0
"""`renew` builds the graph anew, and measures it, when there are so many times the items"""
SAMPLE, SAMPLE_K, EQUAL = 200, 10, 1e-5
"""queries and results with which the recall is measured; similarities that differ by less are equal"""
BUILD_MEMORY = "512MB"
"""memory in which the embedded PostgreSQL builds a graph"""
MOST_EF = 1_000
"""the largest `hnsw.ef_search`"""
MOST_INDEXED_DIM = 2_000
"""dimensions that pgvector can index"""
COLUMNS = "number, id, label, metadata, stamp, keys, numbers, times, thumbnail, vector"
TYPES = ["int8", "text", "text", "text", "text", "jsonb", "jsonb", "jsonb", "bytea", "vector"]
ROW = "number, id, label, metadata, stamp"
TABLE = """
CREATE TABLE {table} (
  number bigint NOT NULL, id text COLLATE "C" PRIMARY KEY, label text, metadata text NOT NULL, stamp text NOT NULL,
  keys jsonb NOT NULL, numbers jsonb NOT NULL, times jsonb NOT NULL, thumbnail bytea, vector vector({dim}) NOT NULL
)"""


def create_facts(connection: Any) -> None:
    """Make the tables of what is known about all indexes, if this is the first."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtext('proxymetric'))")
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {FACTS_TABLE} (identity text PRIMARY KEY, generation bigint NOT NULL, "
        "store int NOT NULL, dim int NOT NULL, model text NOT NULL, items bigint NOT NULL, added bigint NOT NULL, "
        "last bigint NOT NULL, columns text[] NOT NULL, engine jsonb NOT NULL)"
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {GAPS_TABLE} (identity text, generation bigint, number bigint, "
        "PRIMARY KEY (identity, generation, number))"
    )


def insert_facts(connection: Any, identity: str, facts: Facts) -> None:
    """Write the facts of a new index."""
    connection.execute(
        f"INSERT INTO {FACTS_TABLE} VALUES (%s, {', '.join(['%s'] * len(Facts._fields))})", [identity, *_stored(facts)]
    )


def read_facts(connection: Any, identity: str, lock: str = "") -> Facts | None:
    """Read the facts of an index; None: it is not there."""
    row = connection.execute(
        f"SELECT {', '.join(Facts._fields)} FROM {FACTS_TABLE} WHERE identity = %s {lock}", [identity]
    ).fetchone()
    return None if row is None else Facts(*row)._replace(columns=tuple(row[Facts._fields.index("columns")]))


def _stored(facts: Facts) -> list[Any]:
    from psycopg.types.json import Jsonb

    return [*facts._replace(columns=list(facts.columns), engine=Jsonb(dict(facts.engine)))]  # type: ignore[arg-type]


class PostgresSession:
    """One transaction; see `Session`.

    Args:
        connection: in a transaction.
        identity: of the index.
        facts: the state.
        settings: of the engine.
        version: of pgvector.
    """

    def __init__(
        self, connection: Any, identity: str, facts: Facts, settings: dict[str, Any], version: tuple[int, ...]
    ) -> None:
        self.connection, self.identity, self.facts = connection, identity, facts
        self.settings, self.version = settings, version

    @property
    def table(self) -> str:
        """The table of the items."""
        return f"{PREFIX}_{self.identity}_{self.facts.store}"

    def gaps(self, since: int) -> np.ndarray:
        """See `Session`."""
        statement = f"SELECT number FROM {GAPS_TABLE} WHERE identity = %s AND generation > %s"
        return np.array([row[0] for row in self._all(statement, [self.identity, since])], np.int64)

    def nearest(self, queries: np.ndarray, depth: int, conditions: Sequence[Condition]) -> list[Ranked]:
        """See `Session`.

        With a graph, the search goes through it first. A query for which it finds fewer than wanted, with conditions
        fewer than twice as many, is answered again by comparing all items that match.
        """
        where, values = sql_of(conditions)
        has_graph = "built_for" in self.facts.engine and 2 * depth <= MOST_EF
        self._search_by(graph=has_graph, ef=max(self.settings["ef"], 2 * depth))
        # Where a condition leaves hardly enough of the graph's candidates, nearer ones may lie beyond them.
        enough = depth * (2 if conditions and has_graph else 1)
        lists = [self._ranked(query, enough, where, values, has_graph) for query in queries]
        lacking = [place for place, ranked in enumerate(lists) if has_graph and len(ranked) < enough]
        if lacking:
            self._search_by(graph=False)
            for place in lacking:
                lists[place] = self._ranked(queries[place], depth, where, values)
        return [ranked[:depth] for ranked in lists]

    def _ranked(self, query: np.ndarray, depth: int, where: str, values: list[Any], graph: bool = False) -> Ranked:
        # A graph knows no order by a second column; equal similarities come in the order of the numbers all the same.
        order = "distance" if graph else "distance, number"
        rows = self.connection.execute(
            f"SELECT {ROW}, vector <#> %s AS distance FROM {self.table} {where} ORDER BY {order} LIMIT %s",
            [query, *values, depth],
            binary=True,
        ).fetchall()
        rows.sort(key=lambda row: (row[-1], row[0]))
        return [(Row(*row[:-1]), min(1.0, max(-1.0, -row[-1]))) for row in rows]

    def _search_by(self, graph: bool, ef: int = 40) -> None:
        """Say until the end of the transaction whether the graph is used."""
        wanted = {"enable_indexscan": "on" if graph else "off", "jit": "off"}
        if graph:
            wanted["hnsw.ef_search"] = str(min(MOST_EF, ef))
        if graph and self.version >= (0, 8):
            wanted["hnsw.iterative_scan"] = "strict_order"
        calls = ", ".join(["set_config(%s, %s, true)"] * len(wanted))
        self.connection.execute(f"SELECT {calls}", [text for pair in wanted.items() for text in pair])

    def rows(self, ids: Sequence[str]) -> list[Row]:
        """See `Session`."""
        known = [item for item in ids if isinstance(item, str) and "\0" not in item and item.isprintable()]
        return [Row(*row) for row in self._all(f"SELECT {ROW} FROM {self.table} WHERE id = ANY(%s)", [known])]

    def row_of(self, number: int) -> Row:
        """See `Session`."""
        return Row(*self._all(f"SELECT {ROW} FROM {self.table} WHERE number = %s", [number])[0])

    def rows_from(self, number: int, limit: int) -> list[Row]:
        """See `Session`."""
        statement = f"SELECT {ROW} FROM {self.table} WHERE number >= %s ORDER BY number LIMIT %s"
        return [Row(*row) for row in self._all(statement, [number, limit])]

    def texts(self, column: str) -> list[Any]:
        """See `Session`."""
        assert column in ("number", "id", "label", "stamp")
        return [row[0] for row in self._all(f"SELECT {column} FROM {self.table} ORDER BY number", [])]

    def vectors(self, numbers: np.ndarray | None) -> np.ndarray:
        """See `Session`."""
        where, values = ("", []) if numbers is None else ("WHERE number = ANY(%s)", [numbers.tolist()])
        count = self.facts.items if numbers is None else len(numbers)
        vectors = np.empty((count, self.facts.dim), np.float32)
        statement = f"SELECT vector FROM {self.table} {where} ORDER BY number"
        with self.connection.cursor("vectors", binary=True) as cursor:
            cursor.itersize = 4_096
            cursor.execute(statement, values, binary=True)
            for place, (vector,) in enumerate(cursor):
                vectors[place] = vector
        return vectors

    def pictures(self, ids: Sequence[str]) -> dict[str, bytes | None]:
        """See `Session`."""
        statement = f"SELECT id, thumbnail FROM {self.table} WHERE id = ANY(%s)"
        pictures = self._all(statement, [list(ids)])
        return {item: None if picture is None else bytes(picture) for item, picture in pictures}

    def anew(self, dim: int) -> None:
        """See `Session`: the former table is removed at the end; who reads it, reads it to its end."""
        self._former, self._is_anew = [self.table], True
        self.facts = self.facts._replace(store=self.facts.store + 1, dim=dim, engine={})
        self._create(dim)

    _former: Sequence[str] = ()
    _is_anew = False

    def _create(self, dim: int) -> None:
        partitions = self.settings["partitions"]
        suffix = " PARTITION BY HASH (id)" if partitions > 1 else ""
        self.connection.execute(TABLE.format(table=self.table, dim=dim) + suffix)
        for number in range(partitions if partitions > 1 else 0):
            self.connection.execute(
                f"CREATE TABLE {self.table}_{number} PARTITION OF {self.table} "
                f"FOR VALUES WITH (MODULUS {partitions}, REMAINDER {number})"
            )
        for kind in ("btree (number)", "gin (keys jsonb_path_ops)"):
            self.connection.execute(f"CREATE INDEX ON {self.table} USING {kind}")

    def put(self, batch: Batch, first: int) -> None:
        """See `Session`."""
        from psycopg.types.json import Jsonb

        self.remove(batch.ids)
        with self.connection.cursor().copy(f"COPY {self.table} ({COLUMNS}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(TYPES)
            for place, (item, vector, label, metadata, stamp, thumbnail) in enumerate(zip(*batch, strict=True)):
                compared = map(Jsonb, comparable(label, Row(0, item, label, metadata, stamp).values()))
                copy.write_row((first + place, item, label, metadata, stamp, *compared, thumbnail, vector))

    def edit(self, edits: Mapping[str, Edit]) -> None:
        """See `Session`."""
        from psycopg.types.json import Jsonb

        for item, edit in edits.items():
            compared = map(Jsonb, comparable(edit.label, Row(0, item, edit.label, edit.metadata, "").values()))
            picture, value = ("", []) if edit.keeps_thumbnail else (", thumbnail = %s", [edit.thumbnail])
            self.connection.execute(
                f"UPDATE {self.table} SET label = %s, metadata = %s, keys = %s, numbers = %s, times = %s{picture} "
                "WHERE id = %s",
                [edit.label, edit.metadata, *compared, *value, item],
            )

    def remove(self, ids: Collection[str]) -> None:
        """See `Session`."""
        if ids:
            self.connection.execute(f"DELETE FROM {self.table} WHERE id = ANY(%s)", [list(ids)])

    def settled(self, facts: Facts, gaps: Iterable[int], renew: bool, say: Callable[[str], None]) -> Facts:
        """See `Session`."""
        self.facts = facts = facts._replace(store=self.facts.store, dim=self.facts.dim, engine=self.facts.engine)
        if self._is_due(renew):
            say(f"building the graph of {facts.items:,} vectors")
            facts = self._with_graph()
        if self._is_anew:  # numbers begin again
            self.connection.execute(f"DELETE FROM {GAPS_TABLE} WHERE identity = %s", [self.identity])
        with self.connection.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO {GAPS_TABLE} VALUES (%s, %s, %s)",
                [(self.identity, facts.generation, number) for number in gaps],
            )
        names = ", ".join(Facts._fields)
        marks = ", ".join(["%s"] * len(Facts._fields))
        self.connection.execute(
            f"UPDATE {FACTS_TABLE} SET ({names}) = ROW({marks}) WHERE identity = %s", [*_stored(facts), self.identity]
        )
        for table in self._former:
            self.connection.execute(f"DROP TABLE IF EXISTS {table}")
        return facts

    def _is_due(self, renew: bool) -> bool:
        """Whether the graph is built now."""
        if self.facts.items < GRAPH_FROM or self.facts.dim > MOST_INDEXED_DIM:
            return False
        built, chosen = self.facts.engine.get("built_for"), [self.settings["m"], self.settings["ef_construction"]]
        if built is None:
            return True
        return renew and (self.facts.items > GROWN * built or chosen != self.facts.engine["graph"])

    def _with_graph(self) -> Facts:
        """Copy all items to a new table with a graph; a sample comes last, so that its recall is that of new ones."""
        source, facts = self.table, self.facts
        former = [*self._former, source]
        self.facts = facts._replace(store=facts.store + 1)
        self._create(facts.dim)
        numbers = [row[0] for row in self._all(f"SELECT number FROM {source} ORDER BY number", [])]
        chosen = np.random.default_rng(0).permutation(numbers)[:SAMPLE].tolist()
        copied = f"INSERT INTO {self.table} ({COLUMNS}) SELECT {COLUMNS} FROM {source}"
        self.connection.execute(f"{copied} WHERE number <> ALL(%s)", [chosen])
        if not self.settings["uri"]:  # ours: the graph is built many times faster in memory
            self.connection.execute("SELECT set_config('maintenance_work_mem', %s, true)", [BUILD_MEMORY])
        m, ef_construction = self.settings["m"], self.settings["ef_construction"]
        self.connection.execute(
            f"CREATE INDEX ON {self.table} USING hnsw (vector vector_ip_ops) "
            f"WITH (m = {int(m)}, ef_construction = {int(ef_construction)})"
        )
        self.connection.execute(f"ANALYZE {self.table}")
        queries = [
            row[0]
            for row in self.connection.execute(
                f"SELECT vector FROM {source} WHERE number = ANY(%s)", [chosen], binary=True
            ).fetchall()
        ]
        self.facts = self.facts._replace(engine={"built_for": facts.items, "graph": [m, ef_construction]})
        recall = self._recall(np.array(queries))
        self.connection.execute(f"{copied} WHERE number = ANY(%s)", [chosen])
        self._former = former
        self.facts = self.facts._replace(engine={**self.facts.engine, "recall": recall})
        return self.facts

    def _recall(self, queries: np.ndarray) -> dict[str, float]:
        """The share of what all comparisons find that the graph finds, of queries that it does not have."""
        shares = []
        for ranked, query in zip(self.nearest(queries, SAMPLE_K, []), queries, strict=True):
            self._search_by(graph=False)
            nearest = self._ranked(query, SAMPLE_K, "", [])
            shares.append(np.mean([score >= nearest[-1][1] - EQUAL for _, score in ranked]))
        return {"queries": len(queries), "k": SAMPLE_K, "value": round(float(np.mean(shares)), 4)}

    def _all(self, statement: str, values: list[Any]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.connection.execute(statement, values).fetchall()
        return rows


def sql_of(conditions: Sequence[Condition]) -> tuple[str, list[Any]]:
    """Conditions as SQL: what each item's `keys`, `numbers` and `times` are compared with.

    Returns:
        A WHERE clause, empty without conditions, and its values.

    Example:
        >>> sql_of([Condition("price", "<", ("50",))])
        ('WHERE (numbers->>%s)::float8 < %s', ['price', 50.0])
    """
    clauses, values = [], []
    for column, operator, wanted in conditions:
        if operator in ORDERS:
            (limit,) = wanted
            number, time = number_of(limit), date_of(limit)
            kind, table = ("float8", "numbers") if number is not None else ("bigint", "times")
            clauses.append(f"({table}->>%s)::{kind} {operator} %s")
            values += [column, number if number is not None or time is None else microseconds(time)]
            continue
        any_of = " OR ".join(["keys @> %s::jsonb"] * len(wanted))
        clauses.append(f"{'NOT ' if operator == '!=' else ''}({any_of or 'false'})")
        values += [json.dumps({column: [key_of(value)]}, ensure_ascii=False) for value in wanted]
    return ("WHERE " + " AND ".join(clauses) if clauses else ""), values
