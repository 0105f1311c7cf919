"""The tool that moves modules, on a small package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from move import Refusal, move

FILES = {
    "scripts/shop/__init__.py": '"""A shop."""\n',
    "scripts/shop/goods/__init__.py": '''
        """Goods, and their prices."""
        from shop.goods.fruit import Fruit
        __all__ = ["Fruit"]
''',
    "scripts/shop/goods/fruit.py": '''
        """Fruit."""
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from shop.goods import prices
        if TYPE_CHECKING:
            from shop.money import Coin

        def _round(value: float) -> float:
            return round(value, 1)

        class Fruit:
            """Sold by weight."""
            price = _round(prices.of("fruit"))
            def pay(self, coin: Coin) -> float:
                from shop.goods.prices import TAX as tax
                return self.price * tax
''',
    "scripts/shop/goods/prices.py": '''
        """Prices."""
        from __future__ import annotations
        from os import sep
        TAX = 1.2
        """A factor."""
        KINDS = ["fruit"]

        def of(kind: str) -> float:
            return _round(len(kind + sep))

        def _round(value: float) -> float:
            return value
''',
    "scripts/shop/money.py": '"""Money."""\nclass Coin:\n    pass\n',
    "scripts/shop/till.py": '''
        """A till."""
        from __future__ import annotations
        from shop.goods import Fruit, prices
        from shop.goods.prices import KINDS

        class Till:
            def total(self, count: int) -> float:
                from shop.goods import prices as p
                return count * prices.of("fruit") + p.TAX + len(KINDS)

            def label(self, goods: Fruit) -> str:
                """Made as `shop.goods.prices.of` says."""
                return f"shop.goods.fruit {goods}"
''',
    "tests/test_shop.py": '''
        """Tests."""
        import shop.goods.prices
        from shop.goods import fruit, prices
        from shop.till import Till

        def test_total(monkeypatch):
            monkeypatch.setattr(prices, "_round", float)
            monkeypatch.setattr("shop.goods.prices.TAX", 1.0)
            stock = 3
            assert Till().total(stock) == 3 * prices.of("fruit") + shop.goods.prices.TAX + 1
            assert fruit.Fruit.price
''',
    "docs/page.md": "`shop.goods.prices.KINDS` of [prices](../scripts/shop/goods/prices.py)\n"
    "```python\nfrom shop.goods import Fruit, prices\nprices.of(1)\n```\n",
    "rules/all.smk": "from shop.goods.prices import KINDS, of\n",
}
MAP: dict[str, Any] = {
    "package": "shop",
    "modules": {"shop.stock.whole": ["shop.goods.fruit", "shop.goods.prices", "shop.goods"]},
    "definitions": {"shop.goods.prices.KINDS": "shop.till"},
    "renames": {"shop.goods.prices._round": "_exact", "shop.goods.prices.of": "price_of"},
    "docstrings": {"shop.stock": "Stock."},
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        indented = [line.removeprefix("        ") for line in text.strip("\n").split("\n")]
        path.write_text("\n".join(indented) + "\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def read(shop: Path, name: str) -> str:
    return (shop / name).read_text()


def passes(shop: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests"]
    env = os.environ | {"PYTHONPATH": str(shop / "scripts"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=shop, env=env, check=False, timeout=120)
    return done.returncode == 0


def test_merged_modules_do_what_they_did(shop: Path) -> None:
    assert passes(shop)
    changed = move(MAP, shop)
    assert passes(shop)
    made = read(shop, "scripts/shop/stock/whole.py")
    assert "__all__" not in made
    assert '"""Fruit."""' in made and '"""Prices."""' not in made
    assert 'TAX = 1.2\n"""A factor."""' in made
    assert read(shop, "scripts/shop/stock/__init__.py") == '"""Stock."""\n'
    assert not (shop / "scripts/shop/goods").exists() or not list(
        (shop / "scripts/shop/goods").iterdir()
    )
    assert shop / "scripts/shop/till.py" in changed


def test_a_lazy_import_and_a_definition_follow(shop: Path) -> None:
    move(MAP, shop)
    made = read(shop, "scripts/shop/till.py")
    assert 'KINDS = ["fruit"]' in made
    assert "        from shop.stock import whole as p\n" in made
    assert "self.price * TAX" in read(shop, "scripts/shop/stock/whole.py")


def test_a_local_that_would_hide_the_module_gets_names_imported_one_by_one(shop: Path) -> None:
    modules = {"shop.stock.count": MAP["modules"]["shop.stock.whole"]}
    move({**MAP, "modules": modules}, shop)
    made = read(shop, "scripts/shop/till.py")
    assert "from shop.stock.count import Fruit, price_of" in made
    assert "return count * price_of(" in made
    assert passes(shop)


def test_strings_docs_and_rules_follow(shop: Path) -> None:
    move(MAP, shop)
    assert 'f"shop.stock.whole {goods}"' in read(shop, "scripts/shop/till.py")
    assert 'setattr("shop.stock.whole.TAX", 1.0)' in read(shop, "tests/test_shop.py")
    assert 'setattr(whole, "_exact", float)' in read(shop, "tests/test_shop.py")
    page = read(shop, "docs/page.md")
    assert "`shop.till.KINDS` of [prices](../scripts/shop/stock/whole.py)" in page
    assert "from shop.stock import whole\nwhole.price_of(1)" in page
    assert read(shop, "rules/all.smk") == (
        "from shop.till import KINDS\nfrom shop.stock.whole import price_of\n"
    )


def test_a_second_run_changes_nothing_but_uses_that_came_since(shop: Path) -> None:
    move(MAP, shop)
    assert move(MAP, shop) == []
    new = shop / "scripts/shop/later.py"
    new.write_text(
        "from shop.goods import Fruit, prices\n\nCOST = prices.of(''), prices.KINDS, Fruit\n"
    )
    assert move(MAP, shop) == [new]
    assert 'COST = whole.price_of(""), KINDS, Fruit' in new.read_text()


def test_equal_names_are_refused_until_the_map_renames_one(shop: Path) -> None:
    with pytest.raises(
        Refusal, match=r"`_round` is shop.goods.fruit._round and shop.goods.prices._r"
    ):
        move({**MAP, "renames": {}}, shop)
    assert (shop / "scripts/shop/goods/fruit.py").is_file()


def test_a_name_of_a_builtin_that_another_module_uses_is_refused(shop: Path) -> None:
    with pytest.raises(Refusal, match=r"`round` is builtins.round and shop.goods.prices.round"):
        move({**MAP, "renames": {"shop.goods.prices._round": "round"}}, shop)


def test_a_circle_is_refused(shop: Path) -> None:
    modules = {"shop.goods.prices": ["shop.goods.prices", "shop.till"]}
    with pytest.raises(Refusal, match=r"a circle: .*shop.goods"):
        move({"modules": modules, "package": "shop"}, shop)
