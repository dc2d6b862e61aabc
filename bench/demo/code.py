"""Small Python functions from descriptions: list pipelines, strings, numbers and dictionaries, from templates written here."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass


@dataclass
class Snippet:
    """A request, the reasoning, the function text and one sentence about it."""

    request: str
    thinking: str
    code: str
    note: str
    name: str


LISTS = ["numbers", "values", "nums", "items", "xs", "data"]
WORDLISTS = ["words", "names", "strings", "items"]
TEXTS = ["text", "s", "word", "string"]
REQUESTS = [
    "Write a Python function that {d}.", "Write a function that {d}.", "Please write a Python function that {d}.",
    "I need a Python function that {d}.", "Can you write a function that {d}?", "Give me a Python function that {d}.",
    "Python function: {d}.", "How do I write a Python function that {d}?",
]

# (words in the description, condition on x, part of the function name)
FILTERS = [
    ("even numbers", "x % 2 == 0", "even"), ("odd numbers", "x % 2 == 1", "odd"), ("positive numbers", "x > 0", "positive"),
    ("negative numbers", "x < 0", "negative"), ("numbers greater than {k}", "x > {k}", "above"),
    ("numbers less than {k}", "x < {k}", "below"), ("numbers divisible by {k}", "x % {k} == 0", "multiples"),
    ("numbers not equal to {k}", "x != {k}", "others"), ("numbers", "", ""), ("numbers", "", ""),
]
# (words, expression, part of the name)
MAPS = [
    ("squares of the {f}", "x * x", "squares"), ("doubles of the {f}", "2 * x", "doubles"),
    ("cubes of the {f}", "x ** 3", "cubes"), ("absolute values of the {f}", "abs(x)", "abs"), ("{f}", "x", ""), ("{f}", "x", ""),
    ("halves of the {f}", "x / 2", "halves"), ("{f} plus {j}", "x + {j}", "shifted"),
]
# (words, expression over the generator, name, loop start, loop update)
REDUCERS = [
    ("returns the sum of the {m} in a list", "sum({g})", "sum", "0", "total += {e}"),
    ("returns the largest of the {m} in a list", "max({g})", "max", "None", "total = {e} if total is None else max(total, {e})"),
    ("returns the smallest of the {m} in a list", "min({g})", "min", "None", "total = {e} if total is None else min(total, {e})"),
    ("returns a list of the {m}", "[{g}]", "list", "[]", "total.append({e})"),
    ("counts the {m} in a list", "sum(1 for x in {v}{c})", "count", "0", "total += 1"),
    ("returns the sorted {m} of a list", "sorted({g})", "sorted", "", ""),
    ("returns the product of the {m} in a list", "", "product", "1", "total *= {e}"),
]


def _pipeline(rng: random.Random) -> Snippet:
    fw, cond, fname = rng.choice(FILTERS)
    mw, expr, mname = rng.choice(MAPS)
    rw, reduce, rname, start, update = rng.choice(REDUCERS)
    if rname == "count":
        mw, expr, mname = "{f}", "x", ""
    k, j = rng.randint(2, 9) if "%" in cond else rng.choice((3, 5, 10, 20, 50, 100)), rng.randint(1, 9)
    v = rng.choice(LISTS)
    fw, cond, expr = fw.format(k=k), cond.format(k=k), expr.format(j=j)
    description = rw.format(m=mw.format(f=fw, j=j))
    name = "_".join(p for p in (rname, fname, mname) if p) or rname
    name = {"sum": "sum_list", "max": "largest", "min": "smallest", "list": "copy_list", "count": "count_items",
            "sorted": "sort_list", "product": "product_of"}.get(name, name)
    suffix = f" if {cond}" if cond else ""
    generator = f"{expr} for x in {v}{suffix}" if expr != "x" or cond else (v if rname != "list" else f"x for x in {v}")
    use_loop = reduce == "" or (update and rng.random() < 0.35)
    if use_loop:
        acc = "result" if start == "[]" else "total"
        inner = update.format(e=expr).replace("total", acc)
        block = f"        if {cond}:\n            {inner}" if cond else f"        {inner}"
        code = f"def {name}({v}):\n    {acc} = {start}\n    for x in {v}:\n{block}\n    return {acc}"
        how = "I use a loop"
    else:
        code = f"def {name}({v}):\n    return {reduce.format(g=generator, v=v, c=suffix)}"
        how = "One line is enough"
    steps = [f"The function takes the list {v}."]
    if cond:
        steps.append(f"It keeps x if {cond}.")
    if expr != "x":
        steps.append(f"It uses {expr}.")
    steps.append(f"{how}.")
    request = rng.choice(REQUESTS).format(d=description)
    if use_loop and reduce and rng.random() < 0.7:
        request += " Use a for loop."
    return Snippet(request, " ".join(steps), code, f"The function {description}.", name)


# name, description, parameters, body, thinking
FIXED = [
    ("reverse_string", "reverses a string", "{t}", "return {t}[::-1]", "A slice with step -1 reverses the string."),
    ("is_palindrome", "checks if a string is a palindrome", "{t}", "return {t} == {t}[::-1]", "A palindrome equals its reverse."),
    ("count_vowels", "counts the vowels in a string", "{t}", "return sum(1 for c in {t}.lower() if c in \"aeiou\")",
     "Each character that is in aeiou counts."),
    ("remove_vowels", "removes the vowels from a string", "{t}", "return \"\".join(c for c in {t} if c.lower() not in \"aeiou\")",
     "Keep the characters that are not vowels and join them."),
    ("count_words", "counts the words in a string", "{t}", "return len({t}.split())", "Split at spaces and take the length."),
    ("to_upper", "turns a string into upper case", "{t}", "return {t}.upper()", "Strings have the method upper."),
    ("to_lower", "turns a string into lower case", "{t}", "return {t}.lower()", "Strings have the method lower."),
    ("first_letters", "returns the first letter of each word in a string", "{t}", "return [w[0] for w in {t}.split()]",
     "Split the string and take the first letter of each word."),
    ("capitalize_words", "capitalizes every word in a string", "{t}", "return \" \".join(w.capitalize() for w in {t}.split())",
     "Split, capitalize each word, join with spaces."),
    ("reverse_words", "reverses the order of the words in a string", "{t}", "return \" \".join({t}.split()[::-1])",
     "Split, reverse the list, join with spaces."),
    ("count_letter", "counts how often a letter appears in a string", "{t}, letter", "return {t}.count(letter)",
     "Strings have the method count."),
    ("remove_spaces", "removes all spaces from a string", "{t}", "return {t}.replace(\" \", \"\")", "Replace each space by nothing."),
    ("is_empty", "checks if a string is empty", "{t}", "return len({t}) == 0", "An empty string has the length 0."),
    ("repeat", "repeats a string n times", "{t}, n", "return {t} * n", "A string times a number repeats it."),
    ("letter_counts", "counts each letter of a string in a dictionary", "{t}",
     "counts = {}\nfor c in {t}:\n    counts[c] = counts.get(c, 0) + 1\nreturn counts", "A dictionary maps each letter to its count."),
    ("longest_word", "returns the longest word in a list", "{w}", "return max({w}, key=len)", "max with the key len finds the longest."),
    ("shortest_word", "returns the shortest word in a list", "{w}", "return min({w}, key=len)", "min with the key len finds the shortest."),
    ("join_words", "joins a list of words with commas", "{w}", "return \", \".join({w})", "Use join with a comma and a space."),
    ("word_lengths", "returns the length of each word in a list", "{w}", "return [len(w) for w in {w}]", "Take len of each word."),
    ("sort_by_length", "sorts a list of words by length", "{w}", "return sorted({w}, key=len)", "sorted takes the key len."),
    ("count_long_words", "counts the words with more than {k} letters in a list", "{w}",
     "return sum(1 for w in {w} if len(w) > {k})", "Count the words whose length is greater than {k}."),
    ("average", "returns the average of a list of numbers", "{v}", "return sum({v}) / len({v})", "The average is the sum divided by the count."),
    ("unique", "removes duplicates from a list", "{v}",
     "seen = []\nfor x in {v}:\n    if x not in seen:\n        seen.append(x)\nreturn seen", "Keep x only if it was not seen before."),
    ("reverse_list", "reverses a list", "{v}", "return {v}[::-1]", "A slice with step -1 reverses the list."),
    ("first_and_last", "returns the first and the last item of a list", "{v}", "return {v}[0], {v}[-1]", "Index 0 is the first and -1 is the last."),
    ("contains", "checks if a list contains a value", "{v}, value", "return value in {v}", "The operator in does this."),
    ("is_sorted", "checks if a list is sorted", "{v}", "return {v} == sorted({v})", "A sorted list equals its sorted copy."),
    ("second_largest", "returns the second largest number in a list", "{v}", "return sorted({v})[-2]", "Sort the list and take the item before the last."),
    ("flatten", "flattens a list of lists", "{v}", "return [x for row in {v} for x in row]", "Two loops in one comprehension."),
    ("merge_lists", "joins two lists", "a, b", "return a + b", "The operator + joins lists."),
    ("common_items", "returns the items that are in both lists", "a, b", "return [x for x in a if x in b]", "Keep x from a if it is also in b."),
    ("running_total", "returns the running totals of a list", "{v}",
     "total = 0\nresult = []\nfor x in {v}:\n    total += x\n    result.append(total)\nreturn result", "Add each x to a total and keep every total."),
    ("index_of", "returns the position of a value in a list", "{v}, value",
     "for i, x in enumerate({v}):\n    if x == value:\n        return i\nreturn -1", "Walk with enumerate and return the index, or -1."),
    ("every_nth", "returns every n-th item of a list", "{v}, n", "return {v}[::n]", "A slice with step n does this."),
    ("factorial", "returns the factorial of n", "n", "result = 1\nfor i in range(2, n + 1):\n    result *= i\nreturn result", "Multiply all numbers from 2 to n."),
    ("fibonacci", "returns the n-th Fibonacci number", "n", "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", "Keep two numbers and add them n times."),
    ("is_prime", "checks if a number is prime", "n", "if n < 2:\n    return False\nfor i in range(2, n):\n    if n % i == 0:\n        return False\nreturn True",
     "A prime has no divisor between 2 and n."),
    ("gcd", "returns the greatest common divisor of two numbers", "a, b", "while b:\n    a, b = b, a % b\nreturn a", "The method of Euclid: replace a and b by b and a % b."),
    ("is_even", "checks if a number is even", "n", "return n % 2 == 0", "An even number has the remainder 0."),
    ("is_odd", "checks if a number is odd", "n", "return n % 2 == 1", "An odd number has the remainder 1."),
    ("maximum", "returns the larger of two numbers", "a, b", "if a > b:\n    return a\nreturn b", "Compare a and b."),
    ("minimum", "returns the smaller of two numbers", "a, b", "if a < b:\n    return a\nreturn b", "Compare a and b."),
    ("add", "adds two numbers", "a, b", "return a + b", "Use the operator +."),
    ("multiply", "multiplies two numbers", "a, b", "return a * b", "Use the operator *."),
    ("power", "returns a to the power of b", "a, b", "return a ** b", "The operator ** does this."),
    ("digit_sum", "returns the sum of the digits of a number", "n", "return sum(int(c) for c in str(n))", "Turn n into a string and add the digits."),
    ("countdown", "prints the numbers from n down to 1", "n", "for i in range(n, 0, -1):\n    print(i)", "range with step -1 counts down."),
    ("print_table", "prints the multiplication table of n", "n", "for i in range(1, 11):\n    print(n, \"x\", i, \"=\", n * i)", "Loop from 1 to 10 and print the product."),
    ("celsius_to_fahrenheit", "turns degrees Celsius into Fahrenheit", "celsius", "return celsius * 9 / 5 + 32", "Multiply by 9 / 5 and add 32."),
    ("rectangle_area", "returns the area of a rectangle", "width, height", "return width * height", "The area is width times height."),
    ("circle_area", "returns the area of a circle", "radius", "return 3.14159 * radius ** 2", "The area is pi times the radius squared."),
    ("sum_to", "returns the sum of the numbers from 1 to n", "n", "return sum(range(1, n + 1))", "range from 1 to n + 1, then sum."),
    ("divisors", "returns the divisors of n", "n", "return [i for i in range(1, n + 1) if n % i == 0]", "Keep each i that divides n."),
    ("absolute", "returns the absolute value of a number", "x", "if x < 0:\n    return -x\nreturn x", "Turn the sign if x is negative."),
    ("swap", "swaps the keys and values of a dictionary", "d", "return {v: k for k, v in d.items()}", "Walk over the items and turn each pair around."),
    ("largest_value", "returns the key with the largest value of a dictionary", "d", "return max(d, key=d.get)", "max with the key d.get."),
    ("total_price", "returns the sum of the values of a dictionary", "d", "return sum(d.values())", "Sum the values."),
    ("greet", "greets a person by name", "name", "return \"Hello, \" + name + \"!\"", "Join the parts with +."),
    ("clamp", "limits a number to the range from low to high", "x, low, high", "return max(low, min(x, high))", "Use min and max."),
    ("fizzbuzz", "plays FizzBuzz up to n", "n",
     "for i in range(1, n + 1):\n    if i % 15 == 0:\n        print(\"FizzBuzz\")\n    elif i % 3 == 0:\n        print(\"Fizz\")\n    elif i % 5 == 0:\n        print(\"Buzz\")\n    else:\n        print(i)",
     "Test 15 first, then 3, then 5."),
]


def _fixed(rng: random.Random) -> Snippet:
    name, description, params, body, thinking = rng.choice(FIXED)
    fields = {"{t}": rng.choice(TEXTS), "{w}": rng.choice(WORDLISTS), "{v}": rng.choice(LISTS), "{k}": str(rng.randint(3, 8))}

    def fill(s: str) -> str:
        for key, value in fields.items():
            s = s.replace(key, value)
        return s

    description = fill(description)
    code = f"def {name}({fill(params)}):\n" + textwrap.indent(fill(body), "    ")
    first = fill(params)
    start = f"The parameters are {first}. " if "," in first else f"The parameter is {first}. "
    return Snippet(rng.choice(REQUESTS).format(d=description), start + fill(thinking), code, f"The function {description}.", name)


def with_docstring(snippet: Snippet) -> str:
    """Return the code with the note as docstring."""
    head, body = snippet.code.split("\n", 1)
    text = snippet.note.removeprefix("The function ")
    return f'{head}\n    """{text[0].upper()}{text[1:]}"""\n{body}'


def fenced(code: str) -> str:
    """Return a Markdown code block."""
    return f"```python\n{code}\n```"


def reply(rng: random.Random, snippet: Snippet) -> tuple[str, str, str]:
    """Return (request, reasoning, reply) with one of several forms of answer."""
    request, code, u = snippet.request, snippet.code, rng.random()
    if rng.random() < 0.15:
        request, code = request + " Add a docstring.", with_docstring(snippet)
    block = fenced(code)
    if u < 0.3:
        block = f"{block}\n\n{snippet.note}"
    elif u < 0.45:
        block = f"Here is the function:\n\n{block}"
    return request, snippet.thinking, block


def make(rng: random.Random) -> Snippet:
    """Return one function with its request."""
    return _pipeline(rng) if rng.random() < 0.55 else _fixed(rng)
