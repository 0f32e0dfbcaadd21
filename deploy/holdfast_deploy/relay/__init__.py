"""Members that can only dial out: a relay joins connections of two members and cannot read what passes."""
