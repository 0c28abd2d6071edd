// The programs that the playground offers, by language and name. Each is a part of a call.

export const EXAMPLES = {
  python: {
    "Hello": { code: 'for number in range(1, 6):\n    print(number, "squared is", number * number)\n' },
    "Standard input": { code: "numbers = map(int, input().split())\nprint(sum(numbers))\n", stdin: "3 14 15 92 65" },
    "Exact mathematics": { code: "import sympy as sp\n\nx = sp.symbols('x')\nsp.integrate(sp.exp(-x**2), (x, -sp.oo, sp.oo))\n", echo_value: true },
    "Writes a file": { code: 'with open("squares.csv", "w") as table:\n    for number in range(1, 6):\n        print(number, number**2, sep=",", file=table)\n', fetch_files: ["squares.csv"] },
    "Fails": { code: 'answer = {"pi": 3.14}\nprint(answer["e"])\n' },
    "Never ends": { code: "import time\n\nprint('thinking …', flush=True)\nwhile True:\n    time.sleep(0.1)\n", limits: { wall_s: 1 } },
    "Wants too much memory": { code: "hoard = []\nwhile True:\n    hoard.append(bytearray(10_000_000))\n", limits: { memory_mb: 128 } },
    "Looks for a network": { code: "import socket\nsocket.create_connection(('1.1.1.1', 53), 2)\n" },
  },
  cpp: {
    "Hello": { code: '#include <iostream>\n\nint main() {\n    for (int number = 1; number < 6; ++number)\n        std::cout << number << " squared is " << number * number << "\\n";\n}\n' },
    "Standard input": { code: "#include <iostream>\n\nint main() {\n    long sum = 0;\n    for (long number; std::cin >> number;) sum += number;\n    std::cout << sum << '\\n';\n}\n", stdin: "3 14 15 92 65" },
    "Fails": { code: "#include <cstdlib>\n\nint main() {\n    std::abort();\n}\n" },
    "Does not compile": { code: "int main() {\n    return missing;\n}\n" },
    "Never ends": { code: "int main() {\n    for (volatile int turns = 0;; ++turns) {\n    }\n}\n", limits: { wall_s: 1 } },
  },
  bash: {
    "Hello": { code: 'for number in 1 2 3 4 5; do\n    echo "$number squared is $((number * number))"\ndone\n' },
    "Standard input": { code: 'read -r -a numbers\nsum=0\nfor number in "${numbers[@]}"; do\n    ((sum += number))\ndone\necho "$sum"\n', stdin: "3 14 15 92 65" },
    "Fails": { code: "ls /missing\n" },
    "Never ends": { code: "echo 'thinking …'\nsleep 60\n", limits: { wall_s: 1 } },
  },
  javascript: {
    "Hello": { code: "for (let number = 1; number < 6; number += 1) {\n    console.log(`${number} squared is ${number * number}`);\n}\n" },
    "Standard input": { code: 'const text = require("fs").readFileSync(0, "utf8");\nconst numbers = text.trim().split(/\\s+/).map(Number);\nconsole.log(numbers.reduce((sum, number) => sum + number));\n', stdin: "3 14 15 92 65" },
    "Fails": { code: 'throw new Error("no answer");\n' },
    "Never ends": { code: 'console.log("thinking …");\nsetInterval(() => {}, 1000);\n', limits: { wall_s: 1 } },
  },
};

/** The name of the example that has this code; empty if none has. */
export function exampleWith(code, language) {
  return Object.entries(EXAMPLES[language] ?? {}).find(([, example]) => example.code === code)?.[0] ?? "";
}
