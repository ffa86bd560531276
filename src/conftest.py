"""Examples of modules that need an extra are left out where the extra is not installed."""

from importlib.util import find_spec

HAS_SERVE = all(find_spec(name) for name in ("fastapi", "uvicorn", "multipart"))
collect_ignore = [] if HAS_SERVE else [f"proxymetric/serve/{name}.py" for name in ("app", "schemas", "server")]
