"""Requests: one reading or one change of an index in Milvus, and conditions as its expressions.

An item is one entity: id, number, vector, label, metadata, stamp, thumbnail, and what conditions compare. One request
replaces it, so that nobody sees a part of it. A change of several items is seen item by item, and the number of the
state rises when all of it is there. What a killed change has written stays, and the next change counts again.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from proxymetric.search.batches import Batch
from proxymetric.search.conditions import ORDERS, Condition, comparable, date_of, key_of, microseconds, number_of
from proxymetric.search.remote.database import Facts
from proxymetric.search.searching import Ranked
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.changes import Edit

PREFIX = "proxymetric"
"""with which the names of collections begin"""
FACTS = -1
"""the number of the entity with the facts, among those of the numbers that are gone"""
MOST_TEXT = 65_535
"""bytes of a text in Milvus"""
MOST_RESULTS, QUERIES_AT_ONCE, ROWS_AT_ONCE, VECTORS_AT_ONCE = 16_384, 256, 8_192, 1_024
"""the largest answer of Milvus; queries, items and vectors of one request"""
GRAPH_FROM, SAMPLE, SAMPLE_K, EQUAL = 10_000, 200, 10, 1e-5
"""items from which the recall is measured, with so many queries and results; similarities that are equal"""
BUILD_SECONDS = 600
"""the longest wait for the graph before its recall is measured"""


def facts_collection(identity: str) -> str:
    """The collection with the facts of an index."""
    return f"{PREFIX}_{identity}"


def items_collection(identity: str, facts: Facts) -> str:
    """The collection of the items of an index."""
    return f"{PREFIX}_{identity}_{facts.store}"


def create_facts(client: Any, identity: str, facts: Facts, settings: Mapping[str, Any]) -> None:
    """Make the collection with the facts of a new index."""
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("number", DataType.INT64, is_primary=True)
    schema.add_field("generation", DataType.INT64)
    schema.add_field("facts", DataType.JSON)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)  # Milvus has no collection without one
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="IP", params={})
    client.create_collection(facts_collection(identity), schema=schema, index_params=index, consistency_level="Strong")
    _write_facts(client, identity, facts, settings)


def _write_facts(client: Any, identity: str, facts: Facts, settings: Mapping[str, Any]) -> None:
    content = facts._replace(columns=list(facts.columns), engine=dict(facts.engine))._asdict()  # type: ignore[arg-type]
    entity = {"number": FACTS, "generation": 0, "facts": content, "vector": [0.0, 0.0]}
    client.upsert(facts_collection(identity), [entity], timeout=settings["timeout"])


def read_facts(client: Any, identity: str, settings: Mapping[str, Any]) -> Facts | None:
    """Read the facts of an index; None: it is not there."""
    entities = client.query(
        facts_collection(identity), filter=f"number == {FACTS}", output_fields=["facts"], timeout=settings["timeout"],
        consistency_level="Strong",
    )  # fmt: skip
    if not entities:
        return None
    facts = Facts(**entities[0]["facts"])
    return facts._replace(columns=tuple(facts.columns))


class MilvusSession:
    """Requests about one index; see `Session`.

    Args:
        client: of the database.
        identity: of the index.
        facts: the state.
        settings: of the engine.
    """

    def __init__(self, client: Any, identity: str, facts: Facts, settings: dict[str, Any]) -> None:
        self.client, self.identity, self.facts, self.settings = client, identity, facts, settings
        self._before, self._former = facts, ""
        self._held: list[dict[str, Any]] = []

    @property
    def collection(self) -> str:
        """The collection of the items."""
        return items_collection(self.identity, self.facts)

    @property
    def _is_server(self) -> bool:
        return "://" in self.settings["uri"]

    def _query(self, expression: str, fields: list[str], limit: int = MOST_RESULTS) -> list[dict[str, Any]]:
        entities: list[dict[str, Any]] = self.client.query(
            self.collection, filter=expression, output_fields=fields, limit=limit,
            consistency_level=self.settings["consistency"], timeout=self.settings["timeout"],
        )  # fmt: skip
        return entities

    def gaps(self, since: int) -> np.ndarray:
        """See `Session`."""
        numbers: list[int] = []
        while True:
            last = numbers[-1] if numbers else FACTS
            entities = self.client.query(
                facts_collection(self.identity), filter=f"number > {last} and generation > {since}",
                output_fields=["number"], limit=MOST_RESULTS, consistency_level="Strong",
            )  # fmt: skip
            numbers += sorted(each["number"] for each in entities)
            if len(entities) < MOST_RESULTS:
                return np.array(numbers, np.int64)

    def nearest(self, queries: np.ndarray, depth: int, conditions: Sequence[Condition]) -> list[Ranked]:
        """See `Session`.

        A query for which Milvus finds fewer than wanted, although there are more, is answered here: by comparing the
        vectors that match, which are fetched.
        """
        expression = expression_of(conditions)
        if depth > MOST_RESULTS:
            return self._compared(queries, depth, expression)
        lists: list[Ranked] = []
        ef = {"ef": max(self.settings["ef"], 2 * depth)} if self._is_server else {}
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            answers = self.client.search(
                self.collection, data=queries[start : start + QUERIES_AT_ONCE].tolist(), filter=expression, limit=depth,
                search_params={"metric_type": "IP", "params": ef}, output_fields=["number", "content"],
                consistency_level=self.settings["consistency"], timeout=self.settings["timeout"],
            )  # fmt: skip
            lists += [_ranked([(_row(hit["entity"], hit["id"]), hit["distance"]) for hit in hits]) for hits in answers]
        lacking = [place for place, ranked in enumerate(lists) if len(ranked) < depth]
        if lacking and self._count(expression) > min(len(lists[place]) for place in lacking):
            for place, ranked in zip(lacking, self._compared(queries[lacking], depth, expression), strict=True):
                lists[place] = ranked
        return lists

    def _count(self, expression: str) -> int:
        (entity,) = self.client.query(
            self.collection, filter=expression, output_fields=["count(*)"],
            consistency_level=self.settings["consistency"], timeout=self.settings["timeout"],
        )  # fmt: skip
        count: int = entity["count(*)"]
        return count

    def _compared(self, queries: np.ndarray, depth: int, expression: str) -> list[Ranked]:
        """Compare the queries with all vectors that match."""
        lists: list[Ranked] = [[] for _ in queries]
        for entities in self._windows(["number", "content", "vector"], VECTORS_AT_ONCE, expression):
            similarities = queries @ np.array([each["vector"] for each in entities], np.float32).T
            rows = [_row(each, each["id"]) for each in entities]
            for place, scores in enumerate(similarities.tolist()):
                lists[place] = _ranked([*lists[place], *zip(rows, scores, strict=True)])[:depth]
        return lists

    def _windows(
        self, fields: list[str], width: int, expression: str = "", start: int = 0
    ) -> Iterator[list[dict[str, Any]]]:
        """All entities that match, some at a time, in the order of their numbers."""
        for first in range(start, self.facts.last, width):
            window = f"number >= {first} and number < {first + width}"
            entities = self._query(f"{window} and {expression}" if expression else window, ["id", *fields])
            if entities:
                yield sorted(entities, key=lambda each: int(each["number"]))

    def rows(self, ids: Sequence[str]) -> list[Row]:
        """See `Session`."""
        return [_row(each, each["id"]) for each in self._entities(ids, ["number", "content"])]

    def _entities(self, ids: Collection[str], fields: list[str]) -> list[dict[str, Any]]:
        known = list(dict.fromkeys(item for item in ids if isinstance(item, str) and item.isprintable()))
        return [
            each
            for start in range(0, len(known), VECTORS_AT_ONCE)
            for each in self._query(f"id in {_texts(known[start : start + VECTORS_AT_ONCE])}", ["id", *fields])
        ]

    def row_of(self, number: int) -> Row:
        """See `Session`."""
        (entity,) = self._query(f"number == {number}", ["id", "number", "content"])
        return _row(entity, entity["id"])

    def rows_from(self, number: int, limit: int) -> list[Row]:
        """See `Session`."""
        entities = next(self._windows(["number", "content"], limit, start=number), [])
        return [_row(each, each["id"]) for each in entities]

    def texts(self, column: str) -> list[Any]:
        """See `Session`."""
        fields = ["number"] if column in ("number", "id") else ["number", "content"]
        windows = self._windows(fields, ROWS_AT_ONCE)
        return [getattr(_row(each, each["id"]), column) for entities in windows for each in entities]

    def vectors(self, numbers: np.ndarray | None) -> np.ndarray:
        """See `Session`."""
        fields = ["number", "vector"]
        if numbers is None:
            windows: Iterable[list[dict[str, Any]]] = self._windows(fields, VECTORS_AT_ONCE)
        else:
            parts = (numbers[start : start + VECTORS_AT_ONCE] for start in range(0, len(numbers), VECTORS_AT_ONCE))
            windows = (self._query(f"number in {part.tolist()}", fields) for part in parts)
        pairs = sorted((each["number"], each["vector"]) for entities in windows for each in entities)
        return np.array([vector for _, vector in pairs], np.float32).reshape(-1, self.facts.dim)

    def pictures(self, ids: Sequence[str]) -> dict[str, bytes | None]:
        """See `Session`."""
        entities = self._entities(ids, ["thumbnail"])
        return {each["id"]: base64.b64decode(each["thumbnail"]) or None for each in entities}

    def repair(self) -> None:
        """Count again after a change that was cut off."""
        if not self.facts.engine.get("unfinished"):
            return
        numbers, rows = np.array(self.texts("number"), np.int64), self.texts("stamp")
        gone = np.setdiff1d(np.arange(self.facts.last), numbers)
        engine = {key: value for key, value in self.facts.engine.items() if key != "unfinished"}
        facts = self.facts._replace(items=len(numbers), added=sum(not stamp for stamp in rows), engine=engine)
        self._write(facts._replace(generation=facts.generation + 1), gone.tolist())
        self._before = self.facts

    def anew(self, dim: int) -> None:
        """See `Session`."""
        self._former = self.collection if self.facts.store else ""
        self.facts = self.facts._replace(store=self.facts.store + 1, dim=dim, engine={}, last=0)
        if self.client.has_collection(self.collection):  # of a killed change
            self.client.drop_collection(self.collection)
        self._create(dim)

    def _create(self, dim: int) -> None:
        from pymilvus import DataType

        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=MOST_TEXT)
        schema.add_field("number", DataType.INT64)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("compared", DataType.JSON)
        for name in ("content", "thumbnail"):
            schema.add_field(name, DataType.VARCHAR, max_length=MOST_TEXT)
        options: dict[str, Any] = {"consistency_level": self.settings["consistency"]}
        if self._is_server and self.settings["partitions"] > 1:
            schema.add_field("part", DataType.INT64, is_partition_key=True)
            options["num_partitions"] = self.settings["partitions"]
        index = self.client.prepare_index_params()
        if self._is_server:
            graph = {"M": self.settings["m"], "efConstruction": self.settings["ef_construction"]}
            index.add_index("vector", index_type="HNSW", metric_type="IP", params=graph)
        else:
            index.add_index("vector", index_type="FLAT", metric_type="IP", params={})
        self.client.create_collection(self.collection, schema=schema, index_params=index, **options)
        if self._is_server and self.settings["replicas"] > 1:
            self.client.release_collection(self.collection)
            self.client.load_collection(self.collection, replica_number=self.settings["replicas"])

    def put(self, batch: Batch, first: int) -> None:
        """See `Session`; some of many items come last, so that the recall is that of new ones."""
        self._begin(first + len(batch.ids))
        parts = "part" if self._is_server and self.settings["partitions"] > 1 else ""
        held = set()
        if self._is_server and first + len(batch.ids) >= GRAPH_FROM and "recall" not in self.facts.engine:
            held = set(
                np.random.default_rng(0).permutation(len(batch.ids))[: min(SAMPLE, len(batch.ids) // 2)].tolist()
            )
        self._held_back(not held)
        waiting: list[dict[str, Any]] = []
        for place, (item, vector, label, metadata, stamp, thumbnail) in enumerate(zip(*batch, strict=True)):
            entity = {"id": item, "number": first + place, "vector": vector.tolist()} | _described(
                label, metadata, stamp, thumbnail, item
            )
            if parts:
                entity[parts] = first + place
            (self._held if place in held else waiting).append(entity)
            if len(waiting) == self.settings["batch"]:
                self._upsert(waiting)
                waiting = []
        self._upsert(waiting)

    def _held_back(self, now: bool) -> None:
        """Write the items that were held back by an earlier batch."""
        if self._held and not now:
            self._upsert(self._held)
            self._held = []

    def _upsert(self, entities: list[dict[str, Any]]) -> None:
        for start in range(0, len(entities), self.settings["batch"]):
            self.client.upsert(self.collection, entities[start : start + self.settings["batch"]])

    def edit(self, edits: Mapping[str, Edit]) -> None:
        """See `Session`."""
        self._begin(self.facts.last)
        entities = []
        for entity in self._entities(edits, ["*"]):
            edit, row = edits[entity["id"]], _row(entity, entity["id"])
            picture = base64.b64decode(entity["thumbnail"]) or None if edit.keeps_thumbnail else edit.thumbnail
            entities.append({**entity, **_described(edit.label, edit.metadata, row.stamp, picture, row.id)})
        self._upsert(entities)

    def remove(self, ids: Collection[str]) -> None:
        """See `Session`."""
        names = list(ids)
        if names:
            self._begin(self.facts.last)
        for start in range(0, len(names), VECTORS_AT_ONCE):
            self.client.delete(self.collection, filter=f"id in {_texts(names[start : start + VECTORS_AT_ONCE])}")

    def _begin(self, last: int) -> None:
        """Write, before the first item, that a change has begun, and the numbers that it needs."""
        if self._former or (self.facts.engine.get("unfinished") and last <= self.facts.last):
            return  # nobody reads the new collection
        engine = {**self.facts.engine, "unfinished": True}
        self.facts = self.facts._replace(engine=engine, last=max(last, self.facts.last))
        _write_facts(self.client, self.identity, self.facts, self.settings)

    def settled(self, facts: Facts, gaps: Iterable[int], renew: bool, say: Callable[[str], None]) -> Facts:
        """See `Session`."""
        engine = {key: value for key, value in self.facts.engine.items() if key != "unfinished"}
        if self._held:
            say(f"measuring the search among {facts.items:,} vectors")
            self.facts = self.facts._replace(last=facts.last)
            engine["recall"] = self._recall()
            self._upsert(self._held)
        now = read_facts(self.client, self.identity, self.settings)
        if now is None or now.generation != self._before.generation:
            raise ValueError(
                f"index: got {self.settings['uri']}, where another machine has changed this index at the same time; "
                "expected one writer: try again"
            )
        facts = facts._replace(store=self.facts.store, dim=self.facts.dim, engine=engine)
        if self._former or facts.store != self._before.store:  # numbers begin again
            self.client.delete(facts_collection(self.identity), filter="number >= 0")
        self._write(facts, gaps)
        if self._former:
            self.client.drop_collection(self._former)
        if not self._is_server:
            self.client.flush(self.collection)  # until then, milvus-lite searches new vectors without NumPy
        return self.facts

    def _write(self, facts: Facts, gaps: Iterable[int]) -> None:
        self.facts = facts
        entities = [
            {"number": number, "generation": facts.generation, "facts": {}, "vector": [0.0, 0.0]} for number in gaps
        ]
        for start in range(0, len(entities), self.settings["batch"]):
            self.client.upsert(facts_collection(self.identity), entities[start : start + self.settings["batch"]])
        _write_facts(self.client, self.identity, facts, self.settings)

    def _recall(self) -> dict[str, float]:
        """The share of what all comparisons find that the graph finds, of queries that it does not have."""
        self.client.flush(self.collection)
        until = time.monotonic() + BUILD_SECONDS
        while time.monotonic() < until:
            facts = self.client.describe_index(self.collection, "vector")
            if not int(facts.get("pending_index_rows", 0)):
                break
            time.sleep(1)
        queries = np.array([entity["vector"] for entity in self._held], np.float32)
        pairs = zip(self.nearest(queries, SAMPLE_K, []), self._compared(queries, SAMPLE_K, ""), strict=True)
        shares = [np.mean([score >= nearest[-1][1] - EQUAL for _, score in ranked]) for ranked, nearest in pairs]
        return {"queries": len(queries), "k": SAMPLE_K, "value": round(float(np.mean(shares)), 4)}


def _described(label: str | None, metadata: str, stamp: str, thumbnail: bytes | None, item: str) -> dict[str, Any]:
    """The fields of an item besides its id, number and vector."""
    compared = comparable(label, Row(0, item, label, metadata, stamp).values())
    content = json.dumps([label, metadata, stamp], ensure_ascii=False)
    picture = base64.b64encode(thumbnail or b"").decode()
    for name, text in (("metadata", content), ("thumbnails", picture)):
        if (size := len(text.encode())) > MOST_TEXT:
            raise ValueError(
                f"{name}: got {size:,} bytes for {item!r}, expected at most {MOST_TEXT:,}, the longest text of Milvus "
                "(a thumbnail is written in base64)"
            )
    return {"compared": compared._asdict(), "content": content, "thumbnail": picture}


def _row(entity: Mapping[str, Any], item: str) -> Row:
    label, metadata, stamp = json.loads(entity["content"]) if "content" in entity else (None, "{}", "")
    return Row(int(entity["number"]), item, label, metadata, stamp)


def _ranked(pairs: Iterable[tuple[Row, float]]) -> Ranked:
    """Most similar first; equal ones in the order of their numbers."""
    return [
        (row, min(1.0, max(-1.0, float(score))))
        for row, score in sorted(pairs, key=lambda pair: (-pair[1], pair[0].number))
    ]


def _texts(values: Iterable[str]) -> str:
    """A list of texts in an expression."""
    return json.dumps(list(values), ensure_ascii=False)


def expression_of(conditions: Sequence[Condition]) -> str:
    """Conditions as an expression of Milvus: what each item's `keys`, `numbers` and `times` are compared with.

    Example:
        >>> expression_of([Condition("price", "<", ("50",)), Condition("brand", "!=", ("a",))])
        '(compared["numbers"]["price"] < 50.0) and (not json_contains_any(compared["keys"]["brand"], ["a"]))'
    """
    parts = []
    for column, operator, wanted in conditions:
        name = json.dumps(column, ensure_ascii=False)
        if operator in ORDERS:
            (limit,) = wanted
            number, time_ = number_of(limit), date_of(limit)
            kind = "numbers" if number is not None or time_ is None else "times"
            value = number if number is not None or time_ is None else microseconds(time_)
            parts.append(f'(compared["{kind}"][{name}] {operator} {value!r})')
            continue
        call = f'json_contains_any(compared["keys"][{name}], {_texts(key_of(value) for value in wanted)})'
        parts.append(f"({'not ' if operator == '!=' else ''}{call})")
    return " and ".join(parts)
