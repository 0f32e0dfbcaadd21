"""Members that can only dial out: a relay passes sealed frames between them and cannot read them."""
