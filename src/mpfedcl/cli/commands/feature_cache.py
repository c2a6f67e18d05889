"""`mpfedcl data cache`: what the feature cache holds, and how to empty it."""

import json

from mpfedcl.cli.arguments.experiments import DataCache
from mpfedcl.cli.progress import stdout_console
from mpfedcl.encoders.feature_cache import FeatureCache
from mpfedcl.report.tables import TextTable


def data_cache_command(arguments: DataCache) -> int:
    """Show the cache, after emptying it if so asked."""
    cache = FeatureCache()
    if arguments.clear:
        cache.clear()
    content = cache.describe()
    cache.close()
    if arguments.json:
        shown = {
            "path": str(cache.path),
            "rows": content.rows,
            "bytes": content.bytes,
            "limit": cache.limit,
            "encoders": content.encoders,
        }
        print(json.dumps(shown, indent=2))
        return 0
    title = (
        f"{cache.path}: {content.bytes / 1024**2:,.1f} MiB of at most {cache.limit / 1024**2:,.0f}"
    )
    rows = [[name, f"{count:,}"] for name, count in content.encoders.items()]
    TextTable(title, ["encoder", "images"], rows or [["none", "0"]]).show(stdout_console())
    return 0
