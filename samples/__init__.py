"""Real training programs that use all of Trine, written as people first write them."""
