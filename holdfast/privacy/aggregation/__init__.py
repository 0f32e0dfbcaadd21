"""Secure aggregation: a server learns the sum of its clients' messages, and nothing else of them.

The protocol is that of Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine
learning", with every secret of a round derived from one that a client keeps, so that a client that was
killed says the same again. A round has four phases, in each of which clients send and the server answers:

1. Every client publishes keys (``announce``), signed by whoever calls this with the client's own key.
2. It deals shares of its secrets to the others, sealed for each of them (``deal``).
3. It sends its message under masks (``masked``): one for each pair, which cancel in the sum, and its own.
4. The server says whose message arrived. Everybody reveals its shares of the own masks of those, and of the
   keys of the others, whose masks do not cancel (``reveal``). From these the server has the sum (``total``).

As long as ``threshold`` clients go through all phases, the sum is that of everybody who came through the
third. Of one client, shares of the own mask and of the key are never both revealed, so that fewer than
``2 threshold - n`` clients who tell a lying server what they know do not help it to any message.
"""
