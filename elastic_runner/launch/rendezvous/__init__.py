"""Rendezvous without a host to lose: an election on storage, then rounds through the elected store."""
