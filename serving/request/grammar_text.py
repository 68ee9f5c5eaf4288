"""A grammar as the text that llguidance reads."""

import json


def whole(body: str, before: str) -> str:
    """A grammar for a matcher, with something before it."""
    top = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: {before}@body'}
    return f'{{"grammars": [{json.dumps(top)}, {{"name": "body", {body[1:]}]}}'
