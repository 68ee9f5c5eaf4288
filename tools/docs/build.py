"""`make docs`: write the pages, and let mkdocs make a site of them. A dead link ends it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .pages import sections, write

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    place = ROOT / "build" / "docs"
    shutil.rmtree(place, ignore_errors=True)
    write(ROOT, place / "pages")
    order = [
        {"Overview": "index.md"},
        *({name: [{title: path} for title, path in pages]} for name, pages in sections(ROOT)),
    ]
    config = ROOT / "build" / "docs" / "mkdocs.yml"  # paths are relative to this file
    told = {"INHERIT": "../../mkdocs.yml", "docs_dir": "pages", "site_dir": "site", "nav": order}
    config.write_text(json.dumps(told, indent=2))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    done = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    if done.returncode == 0:
        print(f"The site is {(place / 'site' / 'index.html').relative_to(ROOT)}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
