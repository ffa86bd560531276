"""Measures what vectors lose when they are cut, rounded to 8 bits, or reduced to their signs.

    proxymetric embed RUN PHOTOS --out photos.safetensors
    python benchmarks/small_vectors.py photos.safetensors --dims 64,128,256,512

For each dimension: float32; int8 with a scale for each vector (what the package does) and with a scale for each
dimension, to justify that choice; signs alone; and signs whose first candidates are ranked again by int8. MAP@R and R@1
of each image against all others, recall@10 against the 32-bit vectors of the same dimension, bytes of a vector, and
milliseconds of a search with one query. Results are written to results/small-vectors-NAME.json, and the picture of
bytes against MAP@R beside them as SVG and PNG. A file of results is drawn again, without measuring:

    python benchmarks/small_vectors.py benchmarks/results/small-vectors-cub-test-half.json
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.core.normalisation import cut, unit
from proxymetric.core.quantisation import LARGEST, bit_codes, bytes_per_vector, int8_codes, rounded
from proxymetric.metrics import Ranking, evaluate, scores
from proxymetric.plots import write_small_vectors
from proxymetric.search import VectorFile
from proxymetric.search.engines.binary import Binary
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.int8 import Int8
from proxymetric.search.measuring import milliseconds, without_itself
from proxymetric.search.storage.state import stored_bytes

RESULTS = Path(__file__).parent / "results"
METRICS = ("R@1", "MAP@R")
FIRST = 10


def per_dimension(vectors: Tensor) -> Tensor:
    """Vectors rounded to 8 bits with one scale for each dimension: the largest number of all vectors in it."""
    scale = vectors.abs().amax(dim=0).clamp_min(1e-12) / LARGEST
    return unit((vectors / scale).round() * scale)


def nearest(vectors: Tensor) -> list[list[int]]:
    """The ten nearest of each vector among all others."""
    return without_itself(Exact(vectors).search(vectors, FIRST + 1)[1], np.arange(len(vectors)))


def recall(wanted: list[list[int]], found: list[list[int]]) -> float:
    """The share of the first ten that are found."""
    shares = [len(set(ours[:FIRST]) & set(theirs[:FIRST])) / FIRST for theirs, ours in zip(wanted, found, strict=True)]
    return round(float(np.mean(shares)), 4)


def ranked_again(engine: Binary, vectors: Tensor, labels: np.ndarray) -> tuple[dict[str, float], list[list[int]]]:
    """The metrics of a search by bits with re-ranking, and what it finds."""
    relevant = np.bincount(labels)[labels] - 1
    found = without_itself(engine.search(vectors, max(FIRST, int(relevant.max())) + 1)[1], np.arange(len(vectors)))
    rows = np.flatnonzero(relevant > 0)
    width = min(map(len, found))
    neighbours = torch.tensor([found[row][:width] for row in rows])
    hits = torch.from_numpy(labels)[neighbours] == torch.from_numpy(labels[rows])[:, None]
    ranking = Ranking(hits, torch.from_numpy(relevant[rows]), neighbours, torch.from_numpy(rows), left_out=0)
    return scores(ranking, METRICS), found


def measure(vectors: Tensor, labels: np.ndarray, dims: list[int]) -> list[dict[str, Any]]:
    """A record for each dimension and kind of numbers."""
    records = []
    for dim in dims:
        whole = cut(vectors, dim).contiguous()
        wanted = nearest(whole)
        codes, bits = int8_codes(whole), bit_codes(whole)
        kinds: dict[str, tuple[Tensor, Any, int]] = {
            "float32": (whole, Exact(whole), bytes_per_vector("float32", dim)),
            "int8": (rounded(whole, "int8"), Int8(codes), bytes_per_vector("int8", dim)),
            "int8, scale of a dimension": (per_dimension(whole), None, bytes_per_vector("int8", dim)),
            "binary, bits alone": (rounded(whole, "binary"), None, bytes_per_vector("binary", dim)),
        }
        for kind, (stored, engine, size) in kinds.items():
            record = {"dim": dim, "vectors": kind, "bytes": size, "scores": evaluate(stored, labels, METRICS)}
            record[f"recall@{FIRST}"] = recall(wanted, nearest(stored))
            if engine is not None:
                record["milliseconds"] = milliseconds(engine, whole)
            records.append(record)
        engine = Binary(bits, codes)
        values, found = ranked_again(engine, whole, labels)
        records.append(
            {
                "dim": dim,
                "vectors": "binary",
                "bytes": stored_bytes("binary", dim),
                "scores": values,
                f"recall@{FIRST}": recall(wanted, found),
                "milliseconds": milliseconds(engine, whole),
            }
        )
    return records


def draw(records: list[dict[str, Any]], folder: Path, name: str) -> None:
    """Draw bytes against MAP@R: bits alone in the SVG of the documents, all kinds that an index has in the PNG."""
    alone = [record for record in records if record["vectors"] in ("float32", "int8", "binary, bits alone")]
    write_small_vectors(folder / f"{name}.svg", alone)
    kinds = ("float32", "int8", "binary", "binary, bits alone")
    write_small_vectors(folder / f"{name}.png", [record for record in records if record["vectors"] in kinds])


def main() -> None:
    """Measure a file of vectors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file of `proxymetric embed`, whose vectors have classes; or results")
    parser.add_argument("--dims", default="", help="separated by commas; by default the dimension of the vectors")
    parser.add_argument("--what", default="", help="a sentence about the vectors, for the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.file.suffix == ".json":
        draw(json.loads(options.file.read_text(encoding="utf-8"))["records"], options.out, options.file.stem)
        return
    file = VectorFile.load(options.file)
    labels = np.unique(file.classes, return_inverse=True)[1].reshape(-1)
    dims = [int(dim) for dim in options.dims.split(",")] if options.dims else [file.dim]
    records = measure(unit(file.vectors), labels, dims)
    name = f"small-vectors-{options.file.stem}"
    content = {
        "what": options.what,
        "vectors": len(file),
        "classes": len(set(file.classes)),
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "records": records,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(records, options.out, name)
    for record in records:
        values = ", ".join(f"{metric} {100 * value:.2f}" for metric, value in record["scores"].items())
        print(record["dim"], record["vectors"], record["bytes"], values, record[f"recall@{FIRST}"])


if __name__ == "__main__":
    main()
