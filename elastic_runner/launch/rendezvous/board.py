"""What the agents of one round tell each other: keys and values, kept by the host."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_runner.launch.rendezvous.wire import Message


class Board:
    """One round's keys. Whoever asks for keys that are not there yet is answered when they are."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[str, int, list[str]]] = []

    def take(self, node: str, message: Message) -> Iterator[tuple[str, Message]]:
        """Answers that follow from what ``node`` says, each with the node it is for."""
        if "set" in message:
            self._values.update(message["set"])
        elif "add" in message:
            self._values[message["add"]] = total = str(int(self._values.get(message["add"], "0")) + message["number"])
            yield node, {"answer": message["ask"], "values": [total]}
        elif "check" in message:
            there = all(key in self._values for key in message["check"])
            yield node, {"answer": message["ask"], "values": [there]}
        else:
            self._waiting.append((node, message["ask"], message["get"]))
        waiting, self._waiting = self._waiting, []
        for asker, ask, keys in waiting:
            if all(key in self._values for key in keys):
                yield asker, {"answer": ask, "values": [self._values[key] for key in keys]}
            else:
                self._waiting.append((asker, ask, keys))

    def forget(self, node: str) -> None:
        """Nobody waits for these answers any more."""
        self._waiting = [each for each in self._waiting if each[0] != node]
