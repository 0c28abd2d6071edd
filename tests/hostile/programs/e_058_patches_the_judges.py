# E 58: changes what print, assert, unittest and == mean; it is still only output and an exit code
# expect: status=error exit=3 blame=model stdout="fooled itself\n"
import builtins
import sys
import unittest

say = print


class Equal(int):
    __eq__ = __ne__ = lambda *_: True
    __hash__ = int.__hash__


assert Equal(1) == 2
unittest.TestCase.assertEqual = lambda *_: None
unittest.TestCase().assertEqual(1, 2)
builtins.print = lambda *_: say("fooled itself")
sys.excepthook = lambda *_: None
print("wrong answer")
raise SystemExit(3)
