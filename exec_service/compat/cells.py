"""Notebook cells as one program: a driver runs them in order in one interpreter and records each finished one in a file.

Cells can write to that file themselves, so it is not trusted: it is read with bounded length, as JSON of a fixed shape, and
decides only what is shown of the cells.
"""

import base64
from typing import Any

import msgspec
from msgspec import Struct

from exec_service.judging.harnesses import quoted

NOTES, OUT, ERR = ".cells.jsonl", ".cell.out", ".cell.err"
FILES = [NOTES, OUT, ERR]
NOTES_BYTES = 32 << 20  # of all records together; the rest is ignored
TEXT_CHARS = 1 << 20  # of one stream, value or picture

# The worker picks the warm interpreter by the imports in the program text, so the cells are included verbatim.
DRIVER = '''\
CELLS = [{cells}]
CELL_TIMEOUT_S = {cell_timeout_s!r}

def main():
    import ast, base64, builtins, io, json, linecache, os, signal, sys, traceback, types

    notes = os.open({notes!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    streams = []
    for fd, name in ((1, {out!r}), (2, {err!r})):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        streams.append(file)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    space = module.__dict__
    space.update(__builtins__=builtins, __annotations__={{}})
    shown = []
    most, write, dumps = {most!r}, os.write, json.dumps

    def cut(text):
        return text if len(text) <= most else text[: most // 2] + "\\n[... cut ...]\\n" + text[-most // 2 :]

    def bundle(value):
        made = {{}}
        if not isinstance(value, type):
            for mime in ("text/html", "text/latex", "text/markdown", "image/svg+xml", "image/png", "image/jpeg"):
                data = getattr(value, f"_repr_{{mime.split('/')[1].split('+')[0]}}_", None)
                try:
                    data = data() if callable(data) else None
                except Exception:
                    data = None
                if isinstance(data, bytes):
                    data = base64.b64encode(data).decode()
                if isinstance(data, str) and len(data) <= most:
                    made[mime] = data
        made["text/plain"] = cut(repr(value))
        return made

    def display(*values, **_):
        shown.extend(figure(value) if type(value).__name__ == "Figure" and hasattr(value, "savefig") else bundle(value)
                     for value in values)

    def figure(one):
        page = io.BytesIO()
        one.savefig(page, format="png", bbox_inches="tight")
        width, height = (round(size * one.dpi) for size in one.get_size_inches())
        words = f"<Figure size {{width}}x{{height}} with {{len(one.axes)}} Axes>"
        picture = base64.b64encode(page.getvalue()).decode()
        return {{"image/png": picture, "text/plain": words}} if len(picture) <= most else {{"text/plain": words}}

    def show(*_, **__):
        """Every open figure, as a notebook shows them when a cell ends."""
        plt = sys.modules.get("matplotlib.pyplot")
        if plt is not None:
            for number in plt.get_fignums():
                shown.append(figure(plt.figure(number)))
            plt.close("all")

    backend = sys.modules["cells_backend"] = types.ModuleType("cells_backend")

    def canvas(name):
        if name != "FigureCanvas":
            raise AttributeError(name)
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        backend.FigureCanvas = FigureCanvasAgg
        return FigureCanvasAgg

    backend.show, backend.__getattr__ = show, canvas
    os.environ["MPLBACKEND"] = "module://cells_backend"
    if "matplotlib.pyplot" in sys.modules:
        canvas("FigureCanvas")
        sys.modules["matplotlib.pyplot"].switch_backend("module://cells_backend")
    space["display"] = display

    def run(source, name):
        source = "\\n".join("" if line.strip().startswith("%matplotlib") else line for line in source.split("\\n"))
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        tree = compile(source, name, "exec", AWAIT | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        evaluate(tree, name, "exec")
        value = None if last is None else evaluate(last, name, "eval")
        if value is not None:
            space["_"] = value
            display(value)

    AWAIT, COROUTINE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, 0x80

    def evaluate(tree, name, mode):
        code = compile(tree, name, mode, AWAIT, dont_inherit=True)
        value = eval(code, space)
        if code.co_flags & COROUTINE:
            import asyncio

            return asyncio.run(value)
        return value

    def failure(error):
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        return {{"ename": type(error).__name__, "evalue": cut(str(error)), "traceback": [cut(line) for line in lines][-100:]}}

    def printed():
        texts = []
        for file in streams:
            data = os.pread(file, 4 * most, 0)
            texts.append(cut(data.decode("utf-8", "replace")))
            os.ftruncate(file, 0)
        return texts

    for number, source in enumerate(CELLS, 1):
        errors = []
        if CELL_TIMEOUT_S:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the program, whatever the cell does
            signal.setitimer(signal.ITIMER_REAL, CELL_TIMEOUT_S)
        try:
            run(source, f"<cell {{number}}>")
            show()
        except BaseException as error:
            errors.append(failure(error))
            try:
                show()
            except BaseException:
                pass
        if CELL_TIMEOUT_S:
            signal.setitimer(signal.ITIMER_REAL, 0)
        stdout, stderr = printed()
        note = dumps({{"stdout": stdout, "stderr": stderr, "display": shown[:], "error": errors}})
        shown.clear()
        write(notes, note.encode() + b"\\n")

main()
'''


class CellError(Struct, frozen=True):
    ename: str
    evalue: str
    traceback: list[str]


class Cell(Struct, frozen=True):
    """The output of one cell."""

    stdout: str
    stderr: str
    display: list[dict[str, str]]
    error: list[CellError]


_decode_cell = msgspec.json.Decoder(Cell).decode


def program(cells: list[str], cell_timeout_s: float) -> str:
    values: dict[str, Any] = {"notes": NOTES, "out": OUT, "err": ERR, "most": TEXT_CHARS}
    return DRIVER.format(cells=", ".join(map(quoted, cells)), cell_timeout_s=cell_timeout_s, **values)


def finished_cells(files: dict[str, str], most: int) -> list[Cell]:
    """The recorded cells, up to the first invalid record."""
    notes = _content(files, NOTES)[:NOTES_BYTES]
    cells: list[Cell] = []
    for line in notes.split(b"\n", most)[:most]:
        try:
            cells.append(_decode_cell(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
    return cells


def left_over(files: dict[str, str]) -> tuple[str, str]:
    """The output of a cell that did not finish."""
    out, err = (_content(files, name)[:TEXT_CHARS].decode("utf-8", "replace") for name in (OUT, ERR))
    return out, err


def _content(files: dict[str, str], name: str) -> bytes:
    return base64.b64decode(files.get(name, ""))
