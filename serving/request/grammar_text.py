"""The JSON form of a grammar that llguidance reads."""

import json


def complete_grammar(body: str, prefix: str) -> str:
    """Return a complete grammar for a matcher: the expression `prefix`, then the rules in
    `body`.
    """
    top = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: {prefix}@body'}
    return f'{{"grammars": [{json.dumps(top)}, {{"name": "body", {body[1:]}]}}'
