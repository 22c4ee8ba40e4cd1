"""The sentences that stand under the fields of a dataclass, read from its source."""

import ast
import inspect
import itertools
import textwrap

__all__ = ["sentences_under_fields"]


def sentences_under_fields(cls: type) -> dict[str, str]:
    """Field → the string that stands under it in the source, of the class and its bases; empty without a source."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # built in, typed at a prompt, or made by make_dataclass
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for statement, below in itertools.pairwise([*body, ast.Pass()]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
                if isinstance(text, str):  # a field declared anew without a sentence keeps that of the base
                    texts[statement.target.id] = text
    return texts
