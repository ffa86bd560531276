"""One file of vectors and file names: save, load, exact search."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from proxymetric.arguments.signatures import neighbour
from proxymetric.core.normalisation import unit
from proxymetric.core.quantisation import bit_codes, check_kind, from_int8, int8_codes
from proxymetric.data.folders import ENDINGS, image_files
from proxymetric.search.engines.binary import Binary
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.int8 import Int8
from proxymetric.search.items import FileEmbedder, loaded
from proxymetric.search.storage.state import stored_bytes
from proxymetric.system.files import check_output, replacing
from proxymetric.system.tensor_files import read_header, read_tensors, write_tensors
from proxymetric.system.text import visible
from proxymetric.system.unreadable import unreadable_lines


class CuttableModel(FileEmbedder, Protocol):
    """A model whose vectors can be cut; `pm.Model` is one."""

    @property
    def source(self) -> Mapping[str, str]:
        """Where it was loaded from."""
        ...

    def cut_to(self, dim: int, *, warn: bool = True) -> CuttableModel:
        """Return the same model with its vectors cut to their first dimensions."""
        ...


class VectorFile:
    """Vectors with names, searched by cosine similarity.

    Args:
        vectors: (N, D).
        names: N file names.
        model: `Model.fingerprint` of the model that made the vectors, so that queries of another model can be refused.
        classes: N class names; None: each file's folder directly under the common folder of all files.
        kind: how the vectors are stored and searched: "float32", "int8" or "binary" (`search.quantisation`). Bits are
            searched first, and the first results are ranked again by 8-bit numbers.

    Raises:
        ValueError: the lengths or shapes do not match, or a number is not finite.

    Example:
        >>> import torch
        >>> vectors = VectorFile(torch.eye(3), ["x", "y", "z"])
        >>> vectors.search(torch.tensor([[0.0, 2.0, 1.0]]), k=2)[0]
        [('y', 0.894...), ('z', 0.447...)]
    """

    def __init__(
        self,
        vectors: Tensor,
        names: Sequence[str],
        model: str = "",
        classes: Sequence[str] | None = None,
        kind: str = "float32",
    ) -> None:
        check_kind(kind)
        if vectors.ndim != 2:
            raise ValueError(f"vectors: got a tensor of shape {tuple(vectors.shape)}, expected (N, D)")
        if len(vectors) != len(names):
            raise ValueError(f"names: got {len(names)} for {len(vectors)} vectors, expected one for each")
        if not vectors.isfinite().all():
            raise ValueError("vectors: got numbers that are not finite (NaN or infinite), expected finite numbers")
        if classes is not None and len(classes) != len(names):
            raise ValueError(f"classes: got {len(classes)} for {len(names)} names, expected one for each")
        self.vectors, self.names, self.model, self.kind = vectors, list(names), model, kind
        self.classes = _folders(self.names) if classes is None else list(classes)
        self.bad: dict[str, str] = {}
        """images of the folder that were left out, each with the reason"""

    @classmethod
    def build(
        cls,
        out: str | Path,
        images: str | Path,
        model: CuttableModel | Callable[[], CuttableModel],
        *,
        dim: int | None = None,
        vectors: str = "float32",
        overwrite: bool = False,
        say: Callable[[str], None] | None = None,
        report: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VectorFile:
        """Embed all images of a folder into one file: what `proxymetric embed` does.

        Args:
            out: the file, whose name ends in .safetensors; vectors of the same model are replaced.
            images: the folder of images; subfolders are searched too.
            model: the model; or a function that returns it, which is called when the other arguments were checked.
            dim: the first dimensions that are kept; None: all.
            vectors: how they are stored: "float32", "int8" or "binary".
            overwrite: replace vectors of another model.
            say: called with a sentence about each image that is left out.
            report: called with a line about the file; None: `say` is.
            progress: called with the number of images that are embedded, and their number.

        Returns:
            The vectors.

        Raises:
            ValueError: an argument is wrong, the file holds something else, or no image can be read.

        Example:
            >>> import proxymetric as pm
            >>> model = pm.load("runs/birds")                                          # doctest: +SKIP
            >>> stored = VectorFile.build("photos.safetensors", "photos", model)       # doctest: +SKIP
        """
        check_kind(vectors)
        target = Path(out)
        if target.suffix != ".safetensors":
            raise ValueError(f"out: got {target}, expected a name that ends in .safetensors")
        kind = "a file that `proxymetric embed` wrote"
        file = check_output("out", target, kind, lambda earlier: cls.model_of(earlier) is not None)
        _check_folder(Path(images))
        whole = loaded(model)
        cut = whole if dim is None else whole.cut_to(dim)
        if file.exists() and not overwrite and cls.model_of(file) != cut.fingerprint():
            raise ValueError(
                f"out: got {target}, which holds vectors of a model other than {_named(cut)}; expected a new file, or "
                "--overwrite"
            )
        stored = cls.of_folder(images, cut, say=say, progress=progress)
        stored.kind = vectors
        stored.save(file)
        if (tell := report or say) is not None:
            size = f"{stored_bytes(stored.kind, stored.dim):,} bytes each ({stored.kind})"
            tell(f"{len(stored)} vectors of {stored.dim} dimensions in {target}: {size}")
        return stored

    @classmethod
    def of_folder(
        cls,
        images: str | Path,
        model: FileEmbedder,
        *,
        say: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VectorFile:
        """Embed all images of a folder that can be read; nothing is written.

        Args:
            images: the folder; subfolders are searched too.
            model: the model.
            say: called with a sentence about each image that is left out.
            progress: called with the number of images that are embedded, and their number.

        Raises:
            ValueError: there is no image that can be read.
        """
        folder, tell = Path(images), say or (lambda sentence: None)
        _check_folder(folder)
        unlisted: dict[str, str] = {}
        files = image_files(folder, unlisted)
        for name, reason in unlisted.items():
            tell(f"left out, cannot be listed: {name} ({reason})")
        if not files:
            raise ValueError(
                f"images: got {folder}, which has no images; expected files that end in {', '.join(ENDINGS)}"
            )
        bad: dict[str, str] = {}
        vectors, indices = model.embed(files, errors="skip", progress=progress, on_bad=bad.__setitem__)
        for line in unreadable_lines([f"{visible(title)} ({reason})" for title, reason in bad.items()]):
            tell(line)
        if not indices:
            raise ValueError(
                f"images: got {len(files)} images, none of which can be read; expected images that can be decoded"
            )
        readable_files = [files[i] for i in indices]
        classes = [path.relative_to(folder).parts[0] if path.parent != folder else "" for path in readable_files]
        stored = cls(vectors, [str(path) for path in readable_files], model.fingerprint(), classes)
        stored.bad = unlisted | bad
        return stored

    def check_model(self, model: CuttableModel, file: Path) -> None:
        """Refuse a model that did not make the vectors of a file.

        Raises:
            ValueError: the fingerprints differ.
        """
        if self.model != model.fingerprint():
            raise ValueError(
                f"images: got {file}, which holds vectors of a model other than {_named(model)}; expected a file that "
                "`proxymetric embed` wrote with this model"
            )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def dim(self) -> int:
        """The dimensions of the vectors."""
        return int(self.vectors.shape[1])

    def search(
        self, queries: Tensor, k: int = 8, without: Sequence[str] | None = None
    ) -> list[list[tuple[str, float]]]:
        """Find the names that are nearest to each query.

        Args:
            queries: (Q, D).
            k: results for each query, at least 1; fewer come back if there are fewer vectors.
            without: Q file names, one for each query; the results of a query leave out its own file.

        Returns:
            For each query, pairs of name and cosine similarity, nearest first; ties are in the order of the vectors.

        Raises:
            ValueError: an argument is wrong.

        Example:
            >>> import torch
            >>> VectorFile(torch.eye(2), ["x", "y"]).search(torch.eye(2), k=1, without=["x", "elsewhere"])
            [[('y', 0.0)], [('y', 1.0)]]
        """
        if k < 1:
            raise ValueError(f"k: got {k}, expected at least 1")
        if queries.ndim != 2 or queries.shape[1] != self.vectors.shape[1]:
            raise ValueError(
                f"queries: got a tensor of shape {tuple(queries.shape)}, expected (Q, {self.vectors.shape[1]}) as the "
                "stored vectors, embedded by the same model"
            )
        if not queries.isfinite().all():
            raise ValueError("queries: got numbers that are not finite (NaN or infinite), expected finite numbers")
        if without is not None and len(without) != len(queries):
            raise ValueError(f"without: got {len(without)} names for {len(queries)} queries, expected one for each")
        left_out: list[set[int]] = [set() for _ in queries]
        if without is not None:
            paths = [str(Path(name).resolve()) for name in self.names]
            query_paths = [str(Path(name).resolve()) for name in without]
            left_out = [{row for row, path in enumerate(paths) if path == query} for query in query_paths]
        values, columns = self._engine().search(unit(queries), k + max(map(len, left_out), default=0))
        return [
            [(self.names[row], score) for row, score in zip(rows, scores, strict=True) if row not in own_rows][:k]
            for rows, scores, own_rows in zip(columns.tolist(), values.clamp(-1, 1).tolist(), left_out, strict=True)
        ]

    def _engine(self) -> Exact | Int8 | Binary:
        if self.kind == "float32":
            return Exact(unit(self.vectors))
        codes = int8_codes(self.vectors)
        return Int8(codes) if self.kind == "int8" else Binary(bit_codes(self.vectors), codes)

    @staticmethod
    def model_of(file: str | Path) -> str | None:
        """The fingerprint of the model that made the vectors of a file; None if it is no file of vectors."""
        header = read_header(file)
        return header.get("model", "") if "names" in header else None

    def save(self, file: str | Path) -> None:
        """Write a safetensors file: `vectors`, with names, classes and model in its header.

        Instead of `vectors`, a file of the kind "int8" holds `codes` (N, D), and one of the kind "binary" holds `codes`
        and `bits` (N, bytes).
        """
        header = {"names": json.dumps(self.names), "model": self.model, "classes": json.dumps(self.classes)}
        tensors = {"vectors": self.vectors}
        if self.kind != "float32":
            header["vectors"] = self.kind
            tensors = {"codes": int8_codes(self.vectors)}
        if self.kind == "binary":
            tensors["bits"] = bit_codes(self.vectors)
        with replacing(file) as temporary:
            write_tensors(temporary, tensors, header)

    @classmethod
    def load(cls, file: str | Path) -> VectorFile:
        """Load a file of vectors that `save` or `proxymetric embed` wrote.

        Raises:
            ValueError: it is no file of vectors.
        """
        try:
            tensors, header = read_tensors(file)
            classes = json.loads(header["classes"]) if "classes" in header else None
            kind = header.get("vectors", "float32")
            vectors = tensors["vectors"] if kind == "float32" else from_int8(tensors["codes"])
            return cls(vectors, json.loads(header["names"]), header.get("model", ""), classes, kind)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"file of vectors: got {file}, expected a file that `proxymetric embed` wrote: {error}"
            ) from None


def _named(model: CuttableModel) -> str:
    """A model in words: the place where it was loaded from, and which of a run it is."""
    return f"{model.source['run']} ({model.source['which']})" if model.source else "this one"


def _check_folder(folder: Path) -> None:
    """Refuse what is not a folder."""
    if not folder.is_dir():
        hint = "" if folder.exists() else neighbour(folder, Path.is_dir)
        raise ValueError(f"images: got {folder}, which is not a folder; expected a folder of images{hint}")


def _folders(names: Sequence[str]) -> list[str]:
    """The folder of each file directly under the common folder of all files; empty for files in the common folder.

    >>> _folders(["photos/cat/1.jpg", "photos/dog/new/2.jpg", "photos/3.jpg"])
    ['cat', 'dog', '']
    """
    parents = [Path(name).parts[:-1] for name in names]
    depth = next((i for i, level in enumerate(zip(*parents)) if len(set(level)) > 1), min(map(len, parents), default=0))
    return [parent[depth] if len(parent) > depth else "" for parent in parents]
