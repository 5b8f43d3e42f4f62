#!/usr/bin/env python3
"""Writes the prompt sets beside this file, 256 prompts each (`coding`, `agentic`, `encyclopedic`, `repeating`), and
`manifest.json`.

    python recipes/prompts/generate.py           write them
    python recipes/prompts/generate.py --check   exit 1 if what is there differs

A line is `{"id": "coding-000", "text": "..."}`. The sets hold no randomness. Neighbours differ in kind and in subject, so
that every stretch of a set has all kinds and lengths and nothing learnt from one prompt helps the next; and a prompt
begins with its subject, so that no two share more than a few tokens of prefix: a cache hit would fake a speed.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PER_SET = 256

# --- coding: 16 subjects (a program each, in some language) x 16 kinds of task --------------------------------------

PROGRAMS: tuple[tuple[str, str, str], ...] = (
    ("interval merging", "Python", '''
def merge_intervals(intervals):
    """Merge overlapping [start, end] pairs."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
'''),
    ("a least-recently-used cache", "Python", """
from collections import OrderedDict

class LRUCache:
    def __init__(self, capacity):
        self.capacity = capacity
        self.items = OrderedDict()

    def get(self, key):
        if key not in self.items:
            return None
        self.items.move_to_end(key)
        return self.items[key]

    def put(self, key, value):
        if key in self.items:
            self.items.move_to_end(key)
        self.items[key] = value
        if len(self.items) > self.capacity:
            self.items.popitem(last=False)
"""),
    ("a token-bucket rate limiter", "Go", """
type Bucket struct {
	mu       sync.Mutex
	capacity float64
	tokens   float64
	perSec   float64
	last     time.Time
}

func (b *Bucket) Allow(n float64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.tokens += now.Sub(b.last).Seconds() * b.perSec
	if b.tokens > b.capacity {
		b.tokens = b.capacity
	}
	b.last = now
	if b.tokens < n {
		return false
	}
	b.tokens -= n
	return true
}
"""),
    ("binary search in a rotated array", "C", """
int search_rotated(const int *a, int n, int x) {
    int lo = 0, hi = n - 1;
    while (lo <= hi) {
        int mid = lo + (hi - lo) / 2;
        if (a[mid] == x) return mid;
        if (a[lo] <= a[mid]) {
            if (a[lo] <= x && x < a[mid]) hi = mid - 1;
            else lo = mid + 1;
        } else {
            if (a[mid] < x && x <= a[hi]) lo = mid + 1;
            else hi = mid - 1;
        }
    }
    return -1;
}
"""),
    ("debouncing user input", "TypeScript", """
export function debounce<T extends unknown[]>(fn: (...args: T) => void, waitMs: number) {
  let timer: ReturnType<typeof setTimeout> | undefined;
  return (...args: T): void => {
    if (timer !== undefined) {
      clearTimeout(timer);
    }
    timer = setTimeout(() => fn(...args), waitMs);
  };
}
"""),
    ("a monthly revenue report", "SQL", """
SELECT c.region,
       date_trunc('month', o.placed_at) AS month,
       sum(l.quantity * l.unit_price) AS revenue,
       count(DISTINCT o.customer_id) AS buyers
FROM orders o
JOIN order_lines l ON l.order_id = o.id
JOIN customers c ON c.id = o.customer_id
WHERE o.status <> 'cancelled'
GROUP BY c.region, date_trunc('month', o.placed_at)
HAVING sum(l.quantity * l.unit_price) > 1000
ORDER BY month, revenue DESC;
"""),
    ("splitting words from a text", "Rust", """
use std::collections::HashMap;

pub fn word_counts(text: &str) -> Vec<(String, usize)> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    for word in text.split(|c: char| !c.is_alphanumeric()) {
        if word.is_empty() {
            continue;
        }
        *counts.entry(word.to_lowercase()).or_insert(0) += 1;
    }
    let mut pairs: Vec<_> = counts.into_iter().collect();
    pairs.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    pairs
}
"""),
    ("rotating log files", "Bash", """
#!/usr/bin/env bash
set -euo pipefail
log=${1:?log file}
keep=${2:-5}
for ((i = keep - 1; i >= 1; i--)); do
  [[ -f "$log.$i.gz" ]] && mv "$log.$i.gz" "$log.$((i + 1)).gz"
done
if [[ -s "$log" ]]; then
  gzip -c "$log" > "$log.1.gz"
  : > "$log"
fi
"""),
    ("Dijkstra's shortest paths", "Python", """
import heapq

def shortest_paths(graph, source):
    distance = {source: 0}
    queue = [(0, source)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > distance.get(node, float("inf")):
            continue
        for neighbour, weight in graph[node].items():
            candidate = d + weight
            if candidate < distance.get(neighbour, float("inf")):
                distance[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distance
"""),
    ("a bounded blocking queue", "Java", """
public final class BoundedQueue<T> {
    private final Object[] items;
    private int head, size;

    public BoundedQueue(int capacity) { items = new Object[capacity]; }

    public synchronized void put(T item) throws InterruptedException {
        while (size == items.length) wait();
        items[(head + size) % items.length] = item;
        size++;
        notifyAll();
    }

    @SuppressWarnings("unchecked")
    public synchronized T take() throws InterruptedException {
        while (size == 0) wait();
        T item = (T) items[head];
        items[head] = null;
        head = (head + 1) % items.length;
        size--;
        notifyAll();
        return item;
    }
}
"""),
    ("matrix multiplication in blocks", "C++", """
void matmul(const float* a, const float* b, float* c, int n) {
    constexpr int block = 64;
    std::fill(c, c + n * n, 0.0f);
    for (int ii = 0; ii < n; ii += block)
        for (int kk = 0; kk < n; kk += block)
            for (int jj = 0; jj < n; jj += block)
                for (int i = ii; i < std::min(ii + block, n); ++i)
                    for (int k = kk; k < std::min(kk + block, n); ++k) {
                        const float x = a[i * n + k];
                        for (int j = jj; j < std::min(jj + block, n); ++j)
                            c[i * n + j] += x * b[k * n + j];
                    }
}
"""),
    ("retrying a network call", "Python", """
import random
import time

def retry(call, attempts=5, base=0.2, cap=10.0, retriable=(TimeoutError, ConnectionError)):
    for attempt in range(attempts):
        try:
            return call()
        except retriable:
            if attempt == attempts - 1:
                raise
            delay = min(cap, base * 2 ** attempt)
            time.sleep(random.uniform(0, delay))
"""),
    ("reading comma-separated values", "JavaScript", """
function parseCsv(text) {
  const rows = [];
  let row = [], field = "", quoted = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c === '"' && text[i + 1] === '"') { field += '"'; i++; }
      else if (c === '"') quoted = false;
      else field += c;
    } else if (c === '"') quoted = true;
    else if (c === ",") { row.push(field); field = ""; }
    else if (c === "\\n") { row.push(field); rows.push(row); row = []; field = ""; }
    else field += c;
  }
  if (field !== "" || row.length) { row.push(field); rows.push(row); }
  return rows;
}
"""),
    ("paged access to an address book", "Python", """
from flask import Flask, jsonify, request

app = Flask(__name__)
PEOPLE = []

@app.get("/people")
def people():
    page = int(request.args.get("page", 1))
    size = min(int(request.args.get("size", 20)), 100)
    start = (page - 1) * size
    found = PEOPLE[start:start + size]
    return jsonify(items=found, page=page, total=len(PEOPLE))

@app.post("/people")
def add():
    person = request.get_json()
    person["id"] = len(PEOPLE) + 1
    PEOPLE.append(person)
    return jsonify(person), 201
"""),
    ("a fixed-size thread pool", "C++", """
class Pool {
public:
    explicit Pool(unsigned n) {
        for (unsigned i = 0; i < n; ++i)
            workers_.emplace_back([this] { run(); });
    }
    ~Pool() {
        { std::lock_guard lock(mutex_); done_ = true; }
        ready_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    void submit(std::function<void()> job) {
        { std::lock_guard lock(mutex_); jobs_.push(std::move(job)); }
        ready_.notify_one();
    }
private:
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            ready_.wait(lock, [this] { return done_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            auto job = std::move(jobs_.front());
            jobs_.pop();
            lock.unlock();
            job();
        }
    }
    std::vector<std::thread> workers_;
    std::queue<std::function<void()>> jobs_;
    std::mutex mutex_;
    std::condition_variable ready_;
    bool done_ = false;
};
"""),
    ("edit distance between two words", "Python", """
def edit_distance(a, b):
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(
                previous[j] + 1,
                current[j - 1] + 1,
                previous[j - 1] + (x != y),
            ))
        previous = current
    return previous[-1]
"""),
)  # fmt: skip

Task = Callable[[str, str, str], str]
TASKS: tuple[Task, ...] = (
    lambda topic, language, code: f"Write a function for {topic} in {language}.",
    lambda topic, language, code: f"Here is {language} code for {topic}:\n```{code}```\nExplain line by line what it does and why it is right.",
    lambda topic, language, code: f"Tests are missing for this {language} code ({topic}). Write them, with the edge cases:\n```{code}```",
    lambda topic, language, code: f"Regarding {topic}: rewrite the following from {language} to Python with type annotations, or to Rust if it is Python already.\n```{code}```",
    lambda topic, language, code: f"Find every bug, race and unchecked input in this {language} code for {topic}. For each give the line, a failing example and a fix.\n```{code}```",
    lambda topic, language, code: f"How would you design {topic} in {language} if it had to serve a million requests a day? Name the data structures, the failure modes and what you would measure.",
    lambda topic, language, code: f"Copy this {language} code for {topic} exactly, adding a one-line comment above each statement and changing nothing else:\n```{code}```",
    lambda topic, language, code: f"What are the time and memory complexity of {topic} as written here in {language}? Prove both, then give a faster variant or show there is none.\n```{code}```",
    lambda topic, language, code: f"A colleague says that {topic} needs no tests in {language}. Answer in five sentences.",
    lambda topic, language, code: f"Repeat the code below with all variables renamed to longer, clearer names; then list old and new names in a table. It is {language}, about {topic}.\n```{code}```",
    lambda topic, language, code: f"Refactor this {language} code for {topic} into small functions of at most eight lines, keep its behaviour, and explain each step of the refactoring.\n```{code}```\nAfterwards show the whole program once more.",
    lambda topic, language, code: f"Write the documentation of {topic} as a README section with an installation step, three examples in {language} and a troubleshooting table with four rows.",
    lambda topic, language, code: f"Two versions of {topic} exist. The first one, in {language}, is:\n```{code}```\nThe second does the same with another data structure. Write the second, then compare both on speed, memory and readability, with numbers you would expect for inputs of size 1,000 and 1,000,000.",
    lambda topic, language, code: f"Code review. The commit adds {topic} ({language}). Write the review as a list of comments, each with severity, place, reason and a suggested change:\n```{code}```\nThe author adds: it works on my machine, the inputs are always small, and nobody calls it from two threads. Answer each of the three claims.",
    lambda topic, language, code: f"Benchmark {topic}: write a {language} program that measures it for growing inputs, prints a table with the median of nine runs, and warns when the machine is too noisy to tell.",
    lambda topic, language, code: f"Given this {language} implementation of {topic},\n```{code}```\nadd logging, metrics for latency and errors, cancellation, and configuration from the environment. Show the complete code twice: first as a patch in unified diff form, then whole. Close with the three things most likely to break in production and how an operator would notice each.",
)  # fmt: skip

# --- agentic: the same 16 programs x 16 situations in which somebody's coding agent has to take its next step ---------

SITUATIONS: tuple[Task, ...] = (
    lambda topic, language, code: "A user asks for it. Name your first three tool calls.",
    lambda topic, language, code: f"You called read_file and got this ({language}, {topic}):\n```{code}```\nThe task is: callers must be able to cancel it. Answer with one JSON object with the keys tool and arguments, where tool is edit_file or run, and with nothing else.",
    lambda topic, language, code: f"The tool run returned exit status 1 and this text: `1 failed, 11 passed: the case with an empty input raised an error`. The file under test, about {topic}, is:\n```{code}```\nSay in two sentences what you think is wrong, then write the {language} edit as a unified diff, then the command that shows that it helped.",
    lambda topic, language, code: f"Plan before you act: {topic} is to be moved from one {language} module into a package of its own, with tests, a changelog entry and no change for callers. Write the plan as a numbered list of tool calls, each with what you expect to see and what you do if you see something else.",
    lambda topic, language, code: f"Your context is nearly full. Summarise the work so far so that another agent can go on with it: you were asked to speed up {topic}, you have read the {language} file below, measured it twice (1.8 s and 1.7 s for a million items), tried one change that made it slower, and undone that.\n```{code}```\nThe summary has four parts: the goal, what is known, what was tried, and the next step.",
    lambda topic, language, code: f"A user says: it is slow. All you know is that it is about {topic}, in {language}. Ask the two questions whose answers would change what you do, and no others.",
    lambda topic, language, code: f"You may call search(text), read_file(path), edit_file(path, old, new) and run(command). search('TODO') found one place, in a {language} file about {topic}:\n```{code}```\nThe user wants every TODO either done or turned into an issue text. There is none in the file you read, though search found one: give the next three calls and the reason for each, and say what you would tell the user if the third finds nothing either.",
    lambda topic, language, code: f"Another agent that you started reports: `{topic} is done, all tests pass`. It changed one {language} file, which is now:\n```{code}```\nList what you check before you believe it, each check as a command or a place to look, ordered by how likely it is to find something.",
    lambda topic, language, code: f"Your change adds {topic}. Write the commit message: one sentence that says why, then at most three lines.",
    lambda topic, language, code: f"Two branches changed the same {language} file, which holds {topic}. Ours is:\n```{code}```\nTheirs renames every public name to a longer one and adds a parameter `limit` that bounds how much work is done. Merge both by hand: show the merged file, then list each place where the two disagreed and what you decided, then the calls that you would have to change elsewhere and how you would find them all.",
    lambda topic, language, code: f"The continuous integration log ends with `killed: out of memory` after 14 minutes, in the job that tests {topic} ({language}). Locally the tests pass in 9 seconds. Here is what is tested:\n```{code}```\nWrite down three hypotheses, each with the cheapest experiment that would refute it, and the tool call for the first experiment.",
    lambda topic, language, code: f"A tool asks for leave to run `rm -rf build dist ../cache` so that {topic} is built afresh ({language}). Decide: yes, no or something else. Give the decision first, then the reason in two sentences.",
    lambda topic, language, code: f"Do these five things to the {language} file about {topic} below, in this order, and show the whole file after each: (1) add a docstring or header comment that says what it promises; (2) refuse bad input with a clear error; (3) make it possible to test without a clock, a network or threads, where it uses any; (4) write three tests; (5) remove what is no longer used. Keep a list of the steps at the top and tick them off as you go.\n```{code}```\nIf a step turns out to need nothing, say so and why, and go on with the next one.",
    lambda topic, language, code: f"You bisected a regression in {topic}: good at commit 41, bad at commit 58, and the {language} code did not change between them. What did, and how do you find out? List your next calls, with what each rules out.",
    lambda topic, language, code: f"Here is the transcript so far.\nuser: make {topic} safe to use from several threads, or say why it is already.\nagent: I will read it first.\ntool read_file:\n```{code}```\nagent: I will look for callers.\ntool search: src/main, line 88; src/worker, line 12; tests/all, lines 5, 9 and 31.\nuser: worker starts sixteen threads and main only one; please do not make main slower.\nGo on as the agent: think aloud in at most five sentences, then write the new {language} code, then a test that fails on the old code nine times out of ten, and end with one sentence to the user that promises no more than the test shows.",
    lambda topic, language, code: f"You have used 40 of 50 allowed tool calls on {topic} and the {language} tests still fail. Tell the user where things stand and what you propose, in a paragraph that they can decide from.",
)  # fmt: skip

# --- encyclopedic: 64 subjects x 4 forms, and 16 fields to compare within -------------------------------------------

SUBJECTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("geology", "rocks, plates and deep time", ("plate tectonics", "the rock cycle", "volcanic eruptions", "ice ages")),
    ("astronomy", "stars and the space between them", ("black holes", "the life of a star", "the moons of Jupiter", "the cosmic background radiation")),
    ("biology", "living things and how they work", ("photosynthesis", "cell division", "the immune system", "natural selection")),
    ("chemistry", "matter and its changes", ("the periodic table", "catalysts", "acids and bases", "the structure of benzene")),
    ("physics", "forces, fields and quanta", ("general relativity", "superconductivity", "the second law of thermodynamics", "the double-slit experiment")),
    ("mathematics", "numbers, shapes and proof", ("prime numbers", "the central limit theorem", "Euler's identity", "Goedel's incompleteness theorems")),
    ("history", "people and what became of their plans", ("the Hanseatic League", "the Silk Road", "the Industrial Revolution", "the fall of Constantinople")),
    ("geography", "places and why they are so", ("the Amazon basin", "the Sahara", "the Himalayas", "the Dutch polders")),
    ("medicine", "illness and healing", ("vaccination", "antibiotics", "the circulation of the blood", "anaesthesia")),
    ("economics", "work, trade and money", ("inflation", "comparative advantage", "central banks", "the tulip mania")),
    ("music", "sound, order and feeling", ("the fugue", "equal temperament", "the origins of jazz", "the symphony orchestra")),
    ("architecture", "building and dwelling", ("Gothic cathedrals", "Roman aqueducts", "the skyscraper", "Japanese timber joints")),
    ("linguistics", "speech and writing", ("the Indo-European languages", "writing systems", "vowel shifts", "sign languages")),
    ("technology", "tools and machines", ("the steam engine", "the printing press", "the transistor", "container shipping")),
    ("oceanography", "the sea and its currents", ("the Gulf Stream", "coral reefs", "tides", "hydrothermal vents")),
    ("philosophy", "questions that stay open", ("Stoicism", "the problem of induction", "the trolley problem", "Plato's cave")),
)  # fmt: skip

Form = Callable[[str, str, str, str], str]
FORMS: tuple[Form, ...] = (
    lambda topic, field, about, other: f"What is meant by {topic}?",
    lambda topic, field, about, other: f"Write an encyclopedia article about {topic} for a general reader, with an introduction, a section on history, a section on how it works, one on open questions, and a list of five further topics in {field}.",
    lambda topic, field, about, other: f"Compare {topic} with {other}. Begin with what {field}, which is about {about}, says of each; then name three things they share and three in which they differ; close with a table.",
    lambda topic, field, about, other: f"Read these notes and then answer.\n\nNotes on {topic}. The subject belongs to {field}: {about}. It is often confused with {other}, though the two were described at different times by people who asked different questions. Early accounts relied on what could be seen with the naked eye or told by travellers; later ones on measurement, and the measurements did not always agree. Textbooks give one date for the decisive discovery, historians several, and the disagreement is itself instructive: a discovery is rarely a moment. In the last fifty years new instruments and new sources changed the picture once more, some settled questions were opened again, and popular accounts have not caught up. Numbers in older works should be read with the error bars that their authors did not print.\n\nQuestions: (1) What is {topic}, in one paragraph? (2) Which discoveries mattered most, in order, with dates as exact as the evidence allows? (3) What did people believe before, and why was that reasonable? (4) Which popular claims about {topic} are wrong? (5) How does {other} relate to it? Answer each in its own section, and say where you are unsure.",
)  # fmt: skip
ANGLES = (
    "Write for a curious twelve-year-old",
    "Write for an expert in a neighbouring field",
    "Use no more than one number in each paragraph",
    "Mention at least one person who is usually forgotten",
)


def coding() -> Iterator[str]:
    """256 prompts about code: every task for every program, once."""
    for i in range(PER_SET):
        topic, language, code = PROGRAMS[(i + i // 16) % 16]
        yield f"{_upper(topic)}, {language}. {TASKS[i % 16](topic, language, code)}"


def agentic() -> Iterator[str]:
    """256 prompts to a coding agent: every situation with every program, once; subjects in another order than `coding`."""
    for i in range(PER_SET):
        topic, language, code = PROGRAMS[(5 * i + i // 16) % 16]
        yield f"{_upper(topic)}, {language}. {SITUATIONS[i % 16](topic, language, code)}"


def encyclopedic() -> Iterator[str]:
    """256 prompts about the world: each of 64 topics in every form, once."""
    for i in range(PER_SET):
        turn, form = i // 64, i % 4
        field, about, topics = SUBJECTS[(i // 4 + 5 * form) % 16]
        topic, other = topics[(turn + form) % 4], topics[(turn + form + 1) % 4]
        yield f"{_upper(topic)} ({field}). {FORMS[form](topic, field, about, other)} {ANGLES[(turn + i // 4) % 4]}."


LINES = ("{a} = {a} + {b}[{n}]", "print({a}, {n})", "if {a} > {n}: {b} = {a}", "{b}.append({a} * {n})")
NAMES = ("total", "count", "price", "width", "score", "index", "value", "speed")


def repeating() -> Iterator[str]:
    """256 short prompts whose answers repeat them: lines of code to copy. What n-gram drafts are made for."""
    for i in range(PER_SET):
        one, other = NAMES[i % 8], NAMES[(i // 8 + i + 3) % 8]
        line = LINES[i % 4].format(a=one, b=other, n=i + 2)
        yield f"Copy this line of code ten times: {line}"


_SETS = {"coding": coding, "agentic": agentic, "encyclopedic": encyclopedic, "repeating": repeating}


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def files() -> dict[str, bytes]:
    """All files by name."""
    written: dict[str, bytes] = {}
    sets: dict[str, object] = {}
    for name, prompts in _SETS.items():
        texts = list(prompts())
        lines = [
            json.dumps({"id": f"{name}-{i:03d}", "text": text}, ensure_ascii=False) for i, text in enumerate(texts)
        ]
        raw = ("\n".join(lines) + "\n").encode()
        written[f"{name}.jsonl"] = raw
        words = sorted(len(text.split()) for text in texts)
        sets[name] = {
            "file": f"{name}.jsonl",
            "sha256": hashlib.sha256(raw).hexdigest(),
            "prompts": len(texts),
            "words": {"min": words[0], "median": words[len(words) // 2], "max": words[-1]},
        }
    written["manifest.json"] = (json.dumps(sets, indent=1) + "\n").encode()
    return written


def main() -> int:
    """Write the files, or check them."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--check", action="store_true", help="write nothing, exit 1 if a file differs")
    check = command.parse_args().check
    stale = 0
    for name, raw in files().items():
        path = HERE / name
        if check:
            same = path.is_file() and path.read_bytes() == raw
            stale += not same
            sys.stdout.write(f"{name}: {'as generated' if same else 'differs'}\n")
        else:
            path.write_bytes(raw)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
