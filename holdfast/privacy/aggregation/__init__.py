"""Secure aggregation: a server learns the sum of its clients' messages, and nothing else of them.

The protocol is that of Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine
learning", with the round of signatures that it has against servers that lie. Every secret of a round follows
from one that a client keeps, so that a client that was killed sends the same again. A round has five phases,
in each of which clients send and the server answers:

1. Every client publishes keys (``Secrets.announcement``). The caller signs them for the client.
2. It deals shares of its secrets to the others, sealed for each of them (``deal``).
3. It sends its message under masks (``masked``): one for each pair, which cancel in the sum, and its own.
4. The server says whose message arrived. Every client signs that (``confirm``), once.
5. A client that sees ``threshold`` such signatures reveals its shares: of the own masks of clients whose
   message arrived, and of the keys of the others, whose masks do not cancel (``reveal``). From these the
   server computes the sum (``total``).

As long as ``threshold`` clients go through all phases, the sum is that of all clients that came through the
third. Let n be the number of clients, of which fewer than ``2 threshold - n`` conspire with a lying server.
Two sets of ``threshold`` signers have an honest client in common, which signs once. So all honest clients
reveal for the same set: of one client, shares of the own mask or of the key, never both. What the server can
unmask is one sum, in which there are all honest clients that signed.
"""
