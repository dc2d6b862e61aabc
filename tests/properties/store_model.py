"""What the store should do, in dictionaries and lists, one object a ticket. Compared with it step by step."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from expert_store.keys import ReadClass
from expert_store.ranking import HARDLY_WANTED
from expert_store.stats import Fate, HintOutcome

EXACT, NEAR, SPECULATIVE = ReadClass


def single(value):
    """Return a number as the store keeps it."""
    return array("f", [value])[0]


@dataclass(eq=False)
class Read:
    """A ticket as the model sees it."""

    key: tuple[int, int]
    issued: ReadClass
    owner: int = 0
    generation: int = 0
    read_class: ReadClass = EXACT
    deadline: int = 0
    confidence: float = 1.0
    arrival: int = 0
    is_guess_read: bool = False
    state: str = "queued"
    fate: Fate | None = None

    def __post_init__(self):
        self.read_class = self.issued

    @property
    def urgency(self):
        return (self.read_class, self.deadline, -self.confidence, self.arrival)


@dataclass(eq=False)
class Asked:
    """A request as the model sees it."""

    request: object
    layer: int
    experts: list[int]
    pending: set[tuple[int, int]]
    is_pinning: bool = True
    is_waited_for: bool = False
    error: str | None = None
    lease: object = None


@dataclass(eq=False)
class Layer:
    """Who holds a slot: by committed demand, or not proven; and who is being read."""

    num_slots: int
    num_experts: int
    max_guesses: int
    order: list[int] = field(default_factory=list)  # committed demand, least recent first
    live: dict[int, Read | None] = field(default_factory=dict)
    cold: dict[int, Read | None] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    wanted: dict[int, float] = field(default_factory=dict)  # how likely, said since the last demand

    @property
    def is_identity(self):
        return self.num_slots >= self.num_experts

    @property
    def holders(self):
        return [*self.order, *self.live, *self.cold]

    @property
    def num_free(self):
        return self.num_slots - len(self.holders)

    @property
    def num_expected(self):
        return sum(guess is not None for guess in self.live.values())


class StoreModel:
    """The rules of DESIGN.md 5 without threads, locks, heaps or bytes."""

    def __init__(self, slots, num_experts, record_bytes, *, min_exact, max_queued, max_reads, budget):
        self.layers = {
            layer: Layer(n, num_experts, n if n >= num_experts else n - min_exact)
            for layer, n in slots.items()
        }
        self.record_bytes = record_bytes
        self.max_queued, self.max_reads, self.budget = max_queued, max_reads, budget
        self.exact, self.guesses, self.reading = [], [], []
        self.asked = []
        self.came = {}  # owner -> guesses that got into a slot without being demanded
        self.generations, self.spent = Counter(), Counter()
        self.unverified = {}
        self.fates = {read_class: Counter() for read_class in ReadClass}
        self.issued = Counter()
        self.hints = Counter()
        self.counts = Counter()
        self.is_stopped = self.gives_way = False
        self.arrivals = 0

    # Looking.

    def in_flight(self, key):
        return next((r for r in [*self.exact, *self.guesses, *self.reading] if r.key == key), None)

    def is_loading(self, key):
        return any(r.key == key for r in [*self.exact, *self.reading])

    def is_full(self, layer, expert):
        return expert in self.layers[layer].holders and not self.is_loading((layer, expert))

    def pins(self, layer):
        return Counter(e for a in self.asked if a.layer == layer and a.is_pinning for e in a.experts)

    def is_stale(self, read):
        return self.is_stopped or read.generation < self.generations[read.owner]

    # Requests.

    def would_exhaust(self, layer, experts, are_guesses_done=False):
        shelf, pins = self.layers[layer], self.pins(layer)
        free = {
            r.key[1]
            for r in self.reading
            if are_guesses_done
            and r.read_class is not EXACT
            and r.key[0] == layer
            and r.key[1] not in experts
        }
        missing = [e for e in experts if e not in shelf.holders]
        stuck = {e for e in shelf.holders if pins[e] or self.is_loading((layer, e)) or e in experts}
        return len(missing) > shelf.num_slots - len(stuck - free)

    def ask(self, request, layer, experts, owner, masks):
        shelf = self.layers[layer]
        joined = [e for e in experts if self.is_loading((layer, e))]
        missing = [e for e in experts if e not in shelf.holders]
        asked = Asked(request, layer, experts, {(layer, e) for e in [*missing, *joined]})
        self.asked.append(asked)  # its hits are pinned before anything is evicted
        for expert in joined:
            self.in_flight((layer, expert)).read_class = EXACT
        self._hit(shelf, [e for e in experts if e in shelf.holders], masks is None)
        for expert in missing:
            self._make_room(shelf, layer)
            if masks is None:
                shelf.order.append(expert)
                shelf.counts[expert] += 1
            else:
                shelf.live[expert] = None
            key = (layer, expert)
            guess = self.in_flight(key)
            if guess is None:
                self._issue(Read(key, EXACT, owner))
                self.counts["misses"] += 1
            else:
                self.guesses.remove(guess)
                guess.read_class = EXACT
                self.exact.append(guess)
                self.counts["joined"] += 1
        for late in [
            g for g in self.guesses if g.key[0] == layer and g.owner == owner and g.read_class is NEAR
        ]:
            self.guesses.remove(late)
            self._close(late, Fate.CANCELLED)
        if masks is not None:
            self.unverified.setdefault(owner, []).append((layer, experts, masks))
        self.counts.update(demands=len(experts), joined=len(joined))
        return asked

    def _issue(self, read):
        self.arrivals += 1
        read.arrival = self.arrivals
        self.issued[read.issued] += 1
        (self.exact if read.issued is EXACT else self.guesses).append(read)
        self.guesses.sort(key=lambda r: r.urgency)

    def _hit(self, shelf, experts, is_committed):
        shelf.wanted.clear()
        known = []
        for expert in experts:
            if expert in shelf.order:
                known.append(expert)
                continue
            guess = shelf.live.pop(expert, None) or shelf.cold.pop(expert, None)
            shelf.cold.pop(expert, None)
            if guess is not None:
                self._used(guess)
            if is_committed:
                shelf.order.append(expert)
                shelf.counts[expert] += 1
            else:
                shelf.live[expert] = None
        for expert, guess in list(shelf.live.items()):
            if guess is not None and guess.read_class is NEAR:
                shelf.cold[expert] = shelf.live.pop(expert)
        if is_committed:
            for expert in known:
                shelf.order.remove(expert)
                shelf.order.append(expert)
                shelf.counts[expert] += 1

    def _used(self, guess):
        if guess.fate is Fate.STALE:
            self.counts["stale_used"] += 1
        elif guess.state == "ready":
            self._close(guess, Fate.IN_TIME)
            self.counts["prefetched"] += 1

    def _close(self, read, fate):
        assert read.fate is None
        read.fate = fate
        self.fates[read.issued][fate] += 1

    def _make_room(self, shelf, layer, guess=None):
        if shelf.num_free or shelf.is_identity:
            return True
        pins = self.pins(layer)

        def able(experts):
            return [e for e in experts if not pins[e] and not self.is_loading((layer, e))]

        if guess is None:
            choice = [*able(shelf.cold), *able(shelf.order), *able(shelf.live)][:1]
        else:
            least = shelf.wanted[guess.key[1]] = single(guess.confidence)
            choice = able(shelf.cold)
            if not any(shelf.wanted.get(e, 0.0) < min(HARDLY_WANTED, least) for e in choice):
                choice += able(shelf.order) if shelf.num_expected < shelf.max_guesses else []
            choice = [e for e in choice if shelf.wanted.get(e, 0.0) < least]
            choice.sort(key=lambda e: max(HARDLY_WANTED, shelf.wanted.get(e, 0.0)))
        if not choice:
            assert guess is not None
            return False
        victim = choice[0]
        if victim in shelf.order:
            shelf.order.remove(victim)
            return True
        left = (shelf.cold if victim in shelf.cold else shelf.live).pop(victim)
        if left is not None and left.fate is Fate.STALE:
            self.counts["stale_evicted"] += 1
        elif left is not None:
            self._close(left, Fate.EVICTED_UNUSED)
        return True

    # Hints.

    def prefetch(self, hints, owner, generation):
        num = 0
        hints = sorted(hints, key=lambda hint: (hint.read_class, hint.deadline, -hint.confidence))
        for hint in hints:
            outcome = self._hint(hint, owner, generation)
            self.hints[outcome] += 1
            num += outcome is HintOutcome.ACCEPTED
        return num

    def _hint(self, hint, owner, generation):
        shelf = self.layers.get(hint.layer)
        key = (hint.layer, hint.expert)
        if self.is_stopped:
            return HintOutcome.STOPPED
        if generation < self.generations[owner]:
            return HintOutcome.STALE
        if shelf is None or not 0 <= hint.expert < shelf.num_experts:
            return HintOutcome.INVALID
        if self.is_full(*key):
            shelf.wanted[hint.expert] = single(hint.confidence)
            return HintOutcome.RESIDENT
        old = self.in_flight(key)
        if old is not None:
            self._hint_again(old, hint, owner, generation)
            return HintOutcome.IN_FLIGHT
        waiting = sum(read.key[0] == hint.layer for read in self.guesses)
        room = shelf.num_free
        if not shelf.is_identity:
            room += max(0, shelf.max_guesses - shelf.num_expected) + len(shelf.cold)
        if not shelf.max_guesses or waiting >= room:
            return HintOutcome.NO_ROOM
        if self.spent[owner] + self.record_bytes[hint.layer] > self.budget:
            return HintOutcome.OVER_BUDGET
        read = Read(key, hint.read_class, owner, generation, EXACT, hint.deadline, hint.confidence)
        if len(self.guesses) >= self.max_queued:
            worst = self.guesses[-1]
            if read.urgency[:3] >= worst.urgency[:3]:
                return HintOutcome.QUEUE_FULL
            self.guesses.remove(worst)
            self._close(worst, Fate.DROPPED)
        self._issue(read)
        self.spent[owner] += self.record_bytes[hint.layer]
        return HintOutcome.ACCEPTED

    def _hint_again(self, old, hint, owner, generation):
        if old.read_class is EXACT:
            return
        is_higher = False
        if old in self.guesses:
            is_higher = (hint.read_class, hint.deadline, -hint.confidence) < old.urgency[:3]
        if is_higher:
            old.read_class = min(old.read_class, hint.read_class)
            old.deadline, old.confidence = hint.deadline, hint.confidence
            self.arrivals += 1
            old.arrival = self.arrivals
            self.guesses.sort(key=lambda r: r.urgency)
        if is_higher or self.is_stale(old):
            old.owner, old.generation = owner, generation

    # Reads.

    def begin_read(self):
        """Start the next read; return it, or None if nothing may be read now."""
        while not self.exact and self.guesses:
            if self.gives_way or sum(read.is_guess_read for read in self.reading) >= self.max_reads:
                return None
            read = self.guesses.pop(0)
            layer, expert = read.key
            shelf = self.layers[layer]
            loading = sum(r.read_class is not EXACT and r.key[0] == layer for r in self.reading)
            if loading >= shelf.max_guesses or not self._make_room(shelf, layer, read):
                self._close(read, Fate.DROPPED)
                continue
            shelf.live[expert] = read
            read.is_guess_read = True
            break
        else:
            if not self.exact:
                return None
            read = self.exact.pop(0)
        read.state = "reading"
        self.reading.append(read)
        return read

    def finish_read(self, index, error):
        read = self.reading.pop(index)
        layer, expert = read.key
        shelf = self.layers[layer]
        waiting = [a for a in self.asked if read.key in a.pending]
        if error is not None and read.is_guess_read and read.read_class is EXACT:
            self._close(read, Fate.FAILED)
            self._issue(Read(read.key, EXACT, read.owner))
            return
        for asked in waiting:
            asked.pending.remove(read.key)
        if error is not None:
            self._close(read, Fate.FAILED)
            if expert in shelf.order:
                shelf.order.remove(expert)
            shelf.live.pop(expert, None)
            shelf.cold.pop(expert, None)
            for asked in waiting:
                asked.error = asked.error or error
                asked.is_pinning = False
            return
        read.state = "ready"
        wanting = [a for a in waiting if a.is_pinning]
        if read.read_class is not EXACT:
            self.came.setdefault(read.owner, []).append(read)
            if self.is_stale(read):
                self._give_up([read])
        elif not wanting:
            self._close(read, Fate.STALE)
        elif any(a.is_waited_for for a in wanting):
            self._close(read, Fate.LATE)
        else:
            self._close(read, Fate.IN_TIME if read.issued is EXACT else Fate.JOINED)

    # Generations.

    def advance(self, owner, num_rows):
        for layer, experts, masks in self.unverified.pop(owner, ()):
            self._settle_block(self.layers[layer], experts, masks, num_rows)
        self.generations[owner] += 1
        self.spent[owner] = 0
        self._cancel([r for r in self.guesses if r.owner == owner and self.is_stale(r)])
        self._give_up([r for r in self.unused(owner) if self.is_stale(r)])

    def _settle_block(self, shelf, experts, masks, num_rows):
        stay = [mask if num_rows is None else mask & ((1 << num_rows) - 1) for mask in masks]
        last_use = sorted((mask.bit_length(), place) for place, mask in enumerate(stay) if mask)
        for _, place in last_use:
            expert = experts[place]
            shelf.counts[expert] += stay[place].bit_count()
            if expert in shelf.holders:
                shelf.live.pop(expert, None)
                shelf.cold.pop(expert, None)
                if expert in shelf.order:
                    shelf.order.remove(expert)
                shelf.order.append(expert)
        for expert, mask in zip(experts, stay, strict=True):
            if not mask and expert in shelf.live and shelf.live[expert] is None:
                shelf.cold[expert] = shelf.live.pop(expert)

    def unused(self, owner):
        """Guesses in slots that wait for their demand, the first that came first."""
        return [guess for guess in self.came.get(owner, ()) if guess.fate is None]

    def _give_up(self, guesses):
        for guess in sorted(guesses, key=lambda g: g.confidence):
            shelf, expert = self.layers[guess.key[0]], guess.key[1]
            if expert in shelf.live:
                shelf.cold[expert] = shelf.live.pop(expert)
            self._close(guess, Fate.STALE)

    def _cancel(self, guesses):
        for guess in guesses:
            self.guesses.remove(guess)
            self._close(guess, Fate.CANCELLED)

    def stop(self):
        self.is_stopped = True
        self._cancel(list(self.guesses))
        for owner in self.came:
            self._give_up(self.unused(owner))
