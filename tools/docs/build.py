"""`make docs`: write the pages and build the site with mkdocs, which fails on dead links."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .pages import sections, write

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    build_folder = ROOT / "build" / "docs"
    shutil.rmtree(build_folder, ignore_errors=True)
    write(ROOT, build_folder / "pages")
    order = [
        {"Overview": "index.md"},
        *({name: [{title: path} for title, path in pages]} for name, pages in sections(ROOT)),
    ]
    config = ROOT / "build" / "docs" / "mkdocs.yml"  # paths are relative to this file
    mkdocs_config = {
        "INHERIT": "../../mkdocs.yml",
        "docs_dir": "pages",
        "site_dir": "site",
        "nav": order,
    }
    config.write_text(json.dumps(mkdocs_config, indent=2))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    process = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    if process.returncode == 0:
        print(f"The site is {(build_folder / 'site' / 'index.html').relative_to(ROOT)}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
