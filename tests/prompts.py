"""Twenty prompts written for this project: short and long, several languages, code, numbers, odd characters."""

SYSTEM = "You answer questions of people who operate servers. Be brief, be exact, and say so when you do not know. "

PROMPTS = [
    "Hi",
    "The capital of France is",
    "Why does a cache need an eviction policy?",
    "List three colours, one per line:\n1.",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM visits\nWHERE day >= '2024-01-01'\n",
    "for i in range(10):\n    if i % 2 == 0:\n        print(",
    "Die Warteschlange ist voll. Was soll der Betreiber jetzt tun?",
    "Il était une fois, dans un petit village au bord de la mer,",
    "El servidor respondió despacio porque",
    "Сколько блоков нужно для тысячи токенов?",
    "メモリが足りないとき、どうすればいいですか。",
    "内存池已满，请求在等待。",
    "1 2 4 8 16 32 64",
    "Q: A pool has 120 blocks of 16 tokens. How many tokens fit?\nA:",
    "😀 😀 🎈 What do these symbols mean?",
    SYSTEM + "Question: what is a watermark good for? Answer:",
    SYSTEM + "Question: what happens to a request that is preempted? Answer:",
    (
        "It was late when the pager rang. The graphs showed what she had feared: the queue had been growing for ten "
        "minutes, every answer took twice as long as the one before, and nobody had changed anything. She opened the "
        "dashboard, looked at the free blocks, and saw the line touch the floor again and again. Somewhere a client "
        "was sending prompts of eight thousand tokens, one after the other, and each of them pushed three smaller ones "
        "out of memory. She thought about it for a moment, and then she"
    ),
    (
        "class BlockPool:\n"
        '    """Hands out blocks and takes them back."""\n\n'
        "    def __init__(self, num_blocks: int) -> None:\n"
        "        self.free = list(range(1, num_blocks))\n"
        "        self.owners: dict[int, str] = {}\n\n"
        "    def allocate(self, owner: str) -> int | None:\n"
        "        if not self.free:\n"
        "            return None\n"
        "        block = self.free.pop()\n"
        "        self.owners[block] = owner\n"
        "        return block\n\n"
        "    def release(self, block: int) -> None:\n"
    ),
]
