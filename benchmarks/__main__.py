"""`python -m benchmarks`: every benchmark there is, one after another."""

from benchmarks import sentiment_seeds

if __name__ == "__main__":
    sentiment_seeds.main()
