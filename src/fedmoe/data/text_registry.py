"""Text, mails and numbers that can be named. See `SourceSpec` for what the fields mean."""

from fedmoe.data.source_spec import Remote, SourceSpec

AG_NEWS_HOST = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
NEWSGROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
# The 80 characters of LEAF's Shakespeare task: fixed and public, so it reveals nothing of what any role said.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

_ag_news = SourceSpec(
    name="ag_news",
    title="AG News",
    folder="ag_news_csv",
    format="ag_news",
    train_rows=120_000,
    test_rows=7_600,
    input_shape=(64,),
    class_names=TOPICS,
    url="https://github.com/mhjabreel/CharCnn_Keras (data/ag_news_csv)",
    cite="Zhang, Zhao and LeCun, Character-level convolutional networks for text classification, 2015",
    licence="none stated (research and other non-commercial use)",
    files={"train.csv": None, "test.csv": None},
    remotes=(
        Remote(f"{AG_NEWS_HOST}/train.csv", "train.csv", "md5:b1a00f826fdfbd249f79597b59e1dc12"),
        Remote(f"{AG_NEWS_HOST}/test.csv", "test.csv", "md5:d52ea96a97a2d943681189a97654912d"),
    ),
)
_newsgroups = SourceSpec(
    name="newsgroups",
    title="20 Newsgroups (bydate)",
    folder="text",
    format="newsgroups",
    train_rows=11_314,
    test_rows=7_532,
    input_shape=(256,),
    class_names=NEWSGROUPS,
    url="http://qwone.com/~jason/20Newsgroups/",
    cite="Lang, NewsWeeder: learning to filter netnews, 1995",
    licence="none stated (Usenet posts, research use)",
    files={"20news_bydate_train.jsonl.xz": None, "20news_bydate_test.jsonl.xz": None},
    remotes=(
        Remote(
            "https://ndownloader.figshare.com/files/5975967",
            "20news-bydate.tar.gz",
            "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
        ),
    ),
)
_sent140 = SourceSpec(
    name="sent140",
    title="Sentiment140 by user (a part)",
    folder="text",
    format="sent140",
    train_rows=14_423,
    test_rows=1_602,
    input_shape=(32,),
    class_names=("negative", "positive"),
    url="https://leaf.cmu.edu (Sentiment140)",
    cite="Go, Bhayani and Huang, 2009; Caldas et al., LEAF, arXiv:1812.01097, 2018",
    licence="none stated (research use)",
    files={"sent140_part.jsonl.xz": None},
    no_remote="no publisher offers it by user in one file. Write one line per user: "
    '{"user": 7, "x": [tweets], "y": [0 or 1]}',
)
_shakespeare = SourceSpec(
    name="shakespeare",
    title="Shakespeare by role (next character)",
    folder="text",
    format="shakespeare",
    train_rows=243_758,
    test_rows=26_400,
    input_shape=(80,),
    class_names=tuple(ALPHABET),
    url="any edition of the plays, cut by speaking role",
    cite="McMahan et al., Communication-efficient learning of deep networks, 2017; Caldas et al., LEAF, 2018",
    licence="public domain",
    files={"shakespeare_by_role.jsonl.xz": None},
    no_remote="no publisher offers it by role in one file. Write one line per role: "
    '{"play": "…", "role": "…", "speeches": [texts]}',
)
INBOXES = {
    "task_b_u00_eval_lab.tf": "76bbd7d5051e7ed93be6863e9e1ea760c0438c33f4d40aab9a89bb572845eff2",
    "task_b_u01_eval_lab.tf": "a21a0445b71b71e7d91efe130c584caa39fe63ef133e87e36459bbd1d1f89da2",
    "task_b_u02_eval_lab.tf": "9461963d0e8eb85913407adbac88d246ec65e17c44b0dcf3f0f59952793a7d52",
    "task_b_u03_eval_lab.tf": "7915d1b155869bb36af5b2c5abcfa3589c925c21d62e684d8290b4ece9cac466",
    "task_b_u04_eval_lab.tf": "fc0cdaa2f5fea06da1480accf3af65f88089dc6b8792a2dc0cfefc25917ed12f",
    "task_b_u05_eval_lab.tf": "a343292f4d43c520063931e797e737010c9e4e83ef01ab8533556a16e670ab22",
    "task_b_u06_eval_lab.tf": "82744c9c20869350ed3d55981550122c7f440cdeb5d4ad4da7349b304c61e37f",
    "task_b_u07_eval_lab.tf": "a3fabecfc03a4a1ea8b140e4ddd86683cb1103791e93aa0b9b70cf16f7e31e53",
    "task_b_u08_eval_lab.tf": "1c0defafcade34aebaba6738ecc1871fea53266335e743c47f6c95a1d570c2d9",
    "task_b_u09_eval_lab.tf": "f556f2fe4606f56f7a8319409e9f8fe117782df95ab104dc749624f2da2a5114",
    "task_b_u10_eval_lab.tf": "c9fb683897630b9a43348eef1eb2b3195434daf0ba5944b57dd51ef1093dae81",
    "task_b_u11_eval_lab.tf": "9a4692ba855e6201f76344bb2e79056db0caaca58a6532e1bb58cb690b0a26b4",
    "task_b_u12_eval_lab.tf": "e31ba5fddad7f05b1260c6f04ed88a43a7f73ebb81dfc5189cfa2163b00900aa",
    "task_b_u13_eval_lab.tf": "f024308b6454ee7735ddbfbfe87c0e011e93d15040a7181ab64680a022cb2434",
    "task_b_u14_eval_lab.tf": "a291c4b52a2445f388e17bcb2c61660287d087a94e2d1f1a6fd796b59e91dad6",
}
_spam = SourceSpec(
    name="spam",
    title="ECML/PKDD 2006 spam, task B",
    folder="ecml2006",
    format="spam",
    train_rows=6_000,
    test_rows=100,
    input_shape=(2, 1024),
    class_names=("wanted", "spam"),
    url="the ECML/PKDD 2006 Discovery Challenge",
    cite="Bickel, ECML-PKDD Discovery Challenge 2006 overview, 2006",
    licence="released by the organisers for research",
    files={**INBOXES, "task_b_labeled_train.tf": "01b9387df5a2667f63da943a904de64724299c30090a7ed3e58c906b66bca4e5"},
    no_remote="the organisers' page is gone. Copies of the challenge's files (evaluation_data_labeled, data_task_b) do",
)
_synthetic_regression = SourceSpec(
    name="synthetic_regression",
    title="5x - 2y + 0.5y³, two users",
    folder=None,
    format="synthetic_regression",
    train_rows=7_000,
    test_rows=1_000,
    input_shape=(2,),
    class_names=(),
    url="generated",
    cite="Peterson, Kanani and Marathe, Private federated learning with domain adaptation, arXiv:1912.06733, 2019",
    licence="none needed",
)

TEXT_SOURCES = (_ag_news, _newsgroups, _sent140, _shakespeare, _spam, _synthetic_regression)
