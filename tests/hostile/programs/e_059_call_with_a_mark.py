# E 59: an earlier call, whose every part bears a mark
# expect: status=ok
# stdin: EXPECTED-ANSWER-59: 42
# env: ANSWER=EXPECTED-ANSWER-59
import sys

answer = ["EXPECTED-ANSWER-59"] * 1000
text = sys.stdin.read() * 100
print("contained")
