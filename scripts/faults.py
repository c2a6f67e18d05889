"""Small faults that a program may have, put into a module's syntax tree one at a time."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitAnd,
}


@dataclass(frozen=True)
class Fault:
    """A fault, by its number in the order of the module's text."""

    number: int
    line: int
    what: str


def find_faults(path: Path) -> Iterator[Fault]:
    """Yield all faults that can be put into a module."""
    planter = _Planter(None)
    planter.visit(_parse(path))
    yield from planter.found


def plant_fault(path: Path, fault: Fault) -> CodeType:
    """Return the code of a module with a fault in it."""
    tree = _Planter(fault.number).visit(_parse(path))
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class _Planter(ast.NodeTransformer):
    """Counts the places for faults, and changes the one that is wanted."""

    def __init__(self, wanted: int | None) -> None:
        self.found: list[Fault] = []
        self._wanted = wanted

    def _is_wanted(self, node: ast.AST, what: str) -> bool:
        number = len(self.found)
        self.found.append(Fault(number, getattr(node, "lineno", 0), what))
        return number == self._wanted

    # What is no behavior: annotations, docstrings, the words of messages.

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        # Imports for the type checker alone are never run.
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node
        return self.generic_visit(node)

    # Faults

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        if self._is_wanted(node, f"without {ast.unparse(node)[:60]}"):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Pass() if self._is_wanted(node, "nothing is raised") else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is None or (
            isinstance(node.value, ast.Constant) and node.value.value is None
        ):
            return node
        if self._is_wanted(node, f"None in place of {ast.unparse(node.value)[:60]}"):
            return ast.Return(ast.Constant(None))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for place, operator in enumerate(node.ops):
            other = _COMPARISONS[type(operator)]
            if self._is_wanted(node, f"{other.__name__} in {ast.unparse(node)[:60]}"):
                node.ops[place] = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._is_wanted(node, f"and/or exchanged in {ast.unparse(node)[:60]}"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        what = f"without the sign in {ast.unparse(node)[:60]}"
        if isinstance(node.op, ast.Not | ast.USub) and self._is_wanted(node, what):
            return node.operand
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _OPERATORS.get(type(node.op))
        if other and self._is_wanted(node, f"{other.__name__} in {ast.unparse(node)[:60]}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if self._is_wanted(node, f"the other way round: {ast.unparse(node)[:60]}"):
            node.body, node.orelse = node.orelse, node.body
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        changed = _change_constant(node.value)
        if changed is not None and self._is_wanted(node, f"{changed!r:.40} for {node.value!r:.40}"):
            return ast.copy_location(ast.Constant(changed), node)
        return node


def _change_constant(value: object) -> bool | int | float | str | None:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 2 * value + 1
    if isinstance(value, str):
        return f"XX{value}"
    return None
