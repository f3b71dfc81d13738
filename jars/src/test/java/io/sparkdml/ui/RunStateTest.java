package io.sparkdml.ui;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertTrue;

import com.fasterxml.jackson.databind.JsonNode;
import org.junit.Test;

public class RunStateTest {
  private final RunState run = new RunState("r");

  private void tell(String... events) {
    for (String each : events) {
      JsonNode event = Told.event(each);
      run.apply((int) Json.whole(event, "rank", -1), event);
    }
  }

  @Test
  public void aRunFromStartToEnd() {
    tell(Told.start("r", 1000));
    assertEquals("starting", run.summary().get("state").asText());
    assertTrue(run.summary().get("progress").isNull());
    tell(Told.steps("r", 1001, 1, 1, 0.9, 10), Told.steps("r", 1005, 1, 5, 0.7, 50));
    JsonNode now = run.summary();
    assertEquals("running", now.get("state").asText());
    assertEquals(0.125, now.get("progress").asDouble(), 1e-9);
    // 40 rows of 400 in 4 s, 350 to go.
    assertEquals(35, now.get("secondsLeft").asDouble(), 1e-6);
    assertEquals(10, now.get("rowsPerSecond").asDouble(), 1e-9);
    assertEquals(0.7, now.get("loss").asDouble(), 0);
    tell("'kind':'epoch','run':'r','time':1010,'row':{'epoch':4,'loss':0.2,'val_loss':0.3,'rows':100}");
    tell(Told.end("r", 1011, "finished"));
    JsonNode done = run.detail();
    assertEquals("finished", done.get("state").asText());
    assertEquals(1, done.get("progress").asDouble(), 0);
    assertTrue(done.get("secondsLeft").isNull());
    assertEquals(1011, done.get("ended").asDouble(), 0);
    assertEquals(9.5, done.get("seconds").asDouble(), 0);
    assertEquals(0.3, done.at("/series/epochs/0/val_loss").asDouble(), 0);
    assertEquals(5, done.at("/series/epochs/0/step").asInt());
    assertEquals(16, done.get("globalBatch").asInt());
  }

  @Test
  public void aRestartTakesBackTheStepsThatAreDoneAgain() {
    tell(Told.start("r", 0), "'kind':'submission','run':'r','number':1,'workers':2,'hosts':['a','b'],'from_step':0");
    for (int step = 1; step <= 20; step++) {
      tell(Told.steps("r", step, 1, step, 1.0 / step, step));
    }
    tell(
        "'kind':'failure','run':'r','time':21,'failed_rank':1,'host':'b','cause':'killed','traceback':'T','step':20",
        "'kind':'restart','run':'r','time':22,'cause':'killed','from_step':10,'workers':1");
    assertEquals("restarting", run.summary().get("state").asText());
    assertEquals(1, run.summary().get("restarts").asInt());
    tell(
        "'kind':'submission','run':'r','time':23,'number':2,'workers':1,'hosts':['a'],'from_step':10",
        Told.steps("r", 24, 1, 11, 0.5, 11));
    JsonNode detail = run.detail();
    assertEquals("running", detail.get("state").asText());
    assertEquals(1, detail.get("workers").asInt());
    assertEquals(11, detail.at("/series/loss").size());
    assertEquals(1, detail.at("/failures/0/rank").asInt());
    assertEquals(10, detail.at("/restartEvents/0/fromStep").asInt());
    assertEquals(2, detail.get("submissions").size());
    for (JsonNode point : detail.at("/series/rowsPerSecond")) {
      assertTrue("a rate below zero: " + point, point.get(1).asDouble() >= 0);
    }
  }

  @Test
  public void hostsThatComeLaterAreOfTheSameSubmission() {
    tell("'kind':'submission','run':'r','time':5,'number':1,'workers':2,'hosts':[],'from_step':0");
    tell("'kind':'submission','run':'r','time':9,'number':1,'workers':2,'hosts':['a','b'],'from_step':0");
    JsonNode submissions = run.detail().get("submissions");
    assertEquals(1, submissions.size());
    assertEquals("b", submissions.at("/0/hosts/1").asText());
    tell(Told.rank("r", 10, 3, 1, 0.1));
    assertEquals("[\"a\",\"b\",null,\"h3\"]", run.detail().at("/submissions/0/hosts").toString());
    assertEquals(5, submissions.at("/0/time").asInt());
  }

  @Test
  public void theSlowRankIsAStraggler() {
    tell(Told.rank("r", 1, 0, 20, 1.0), Told.rank("r", 1, 1, 20, 2.0), Told.rank("r", 1, 2, 20, 1.1));
    JsonNode ranks = run.detail().get("ranks");
    assertFalse(ranks.at("/0/straggler").asBoolean());
    assertTrue(ranks.at("/1/straggler").asBoolean());
    assertEquals(2.0 / 1.1, ranks.at("/1/slower").asDouble(), 1e-9);
    assertEquals(160 / 1.5, ranks.at("/0/rowsPerSecond").asDouble(), 1e-9);
    assertEquals(0.075, run.metric(Metric.STEP_SECONDS, 0), 1e-9);
    tell(
        "'kind':'run-end','run':'r','time':3,'outcome':'finished',"
            + "'stragglers':[{'rank':2,'host':'h2','slower':1.4,'why':'data'}]");
    ranks = run.detail().get("ranks");
    assertFalse("the run's own judgement counts", ranks.at("/1/straggler").asBoolean());
    assertEquals("data", ranks.at("/2/why").asText());
  }

  @Test
  public void everythingIsBounded() {
    String text = "x".repeat(50_000);
    for (int i = 0; i < 5000; i++) {
      tell("'kind':'checkpoint','run':'r','time':1,'id':'c" + i + "','parent':null,'step':" + i + ",'bytes':1");
      tell("'kind':'log','run':'r','time':1,'values':{'name" + i + "':1.0}");
      tell("'kind':'epoch','run':'r','time':1,'row':{'epoch':" + (i + 1) + ",'loss':1.0}");
      if (i < 200) {
        tell("'kind':'failure','run':'r','time':1,'failed_rank':0,'host':'h','cause':'c','traceback':'" + text + "'");
      }
    }
    JsonNode detail = run.detail();
    assertEquals(Limits.CHECKPOINTS, detail.get("checkpoints").size());
    assertEquals(5000, detail.get("checkpointCount").asInt());
    assertEquals("c4999", detail.at("/checkpoints/199/id").asText());
    assertEquals(Limits.LOGGED_NAMES, detail.at("/series/logged").size());
    JsonNode epochs = detail.at("/series/epochs");
    assertTrue(epochs.size() <= Limits.EPOCHS);
    assertEquals(1, epochs.get(0).get("epoch").asInt());
    assertEquals(5000, epochs.get(epochs.size() - 1).get("epoch").asInt());
    assertEquals(Limits.FAILURES, detail.get("failures").size());
    assertTrue(detail.at("/failures/0/traceback").asText().length() < Limits.TRACEBACK + 10);
    assertTrue(Json.text(detail).length() < 2_000_000);
  }

  @Test
  public void whatAFunctionLogsWithoutStepsIsCountedPerRank() {
    tell(Told.start("r", 0));
    for (int i = 0; i < 3; i++) {
      tell("'kind':'log','run':'r','rank':0,'values':{'loss':" + (3 - i) + "}");
      tell("'kind':'log','run':'r','rank':1,'values':{'loss':7}");
    }
    assertEquals("running", run.summary().get("state").asText());
    JsonNode logged = run.detail().at("/series/logged");
    assertEquals("[[1,3.0],[2,2.0],[3,1.0]]", logged.get("loss").toString());
    assertEquals(3, logged.get("loss [1]").size());
    tell("'kind':'log','run':'r','rank':0,'step':40,'values':{'loss':0}");
    assertEquals(40, run.detail().at("/series/logged/loss/3/0").asInt());
  }

  @Test
  public void aLateWordOfADeadSubmissionDoesNotEndTheRestart() {
    tell(Told.start("r", 0), Told.steps("r", 1, 1, 1, 0.5, 5));
    tell("'kind':'restart','run':'r','time':2,'cause':'killed','from_step':0,'workers':1");
    tell(Told.rank("r", 3, 0, 1, 0.1));
    assertEquals("restarting", run.summary().get("state").asText());
  }

  @Test
  public void theBackendAndTheTopologyInUseAreShown() {
    tell(Told.start("r", 0));
    assertEquals("torch", run.summary().get("backend").asText());
    assertTrue(run.summary().get("topology").isNull());
    tell(
        "'kind':'submission','run':'r','number':1,'workers':2,'from_step':0,'backend':'horovod'",
        "'kind':'topology','run':'r','rank':0,'asked':'auto','used':'shared-memory'");
    assertEquals("horovod", run.summary().get("backend").asText());
    assertEquals("shared-memory", run.summary().get("topology").asText());
    tell("'kind':'submission','run':'r','number':2,'workers':2,'from_step':0,'backend':null");
    assertTrue("servers need no backend", run.summary().get("backend").isNull());
  }

  @Test
  public void notesAndEvaluationsAndTheNewestReportOfEachServerAreKept() {
    tell(
        Told.start("r", 0),
        "'kind':'note','run':'r','rank':0,'time':3,'text':'learning rate 0.01'",
        "'kind':'evaluation','run':'r','rank':4,'step':7,'epoch':1,'clock':7,'seconds':0.1,'values':{'val_loss':0.5}",
        "'kind':'server','run':'r','rank':2,'time':3,'seat':0,'pushes':3,'dropped':{'late':1}",
        "'kind':'server','run':'r','rank':2,'time':4,'seat':0,'pushes':9,'dropped':{'late':2,'torn':1}",
        "'kind':'server','run':'r','rank':3,'time':4,'seat':1,'pushes':8,'dropped':{}");
    JsonNode detail = run.detail();
    assertEquals("learning rate 0.01", detail.at("/notes/0/text").asText());
    assertEquals("[[7,0.5]]", detail.at("/series/logged").get("evaluator/val_loss").toString());
    assertEquals(2, detail.at("/reports/server").size());
    assertEquals(
        "{\"rank\":2,\"seat\":0,\"pushes\":9,\"dropped\":\"late: 2, torn: 1\"}",
        detail.at("/reports/server/0").toString());
  }

  @Test
  public void theLossIsTheEpochsMeanAndTheRateOfAnEndedRunIsItsMean() {
    tell(Told.start("r", 0), Told.steps("r", 10, 1, 1, 0.9, 10));
    tell(
        "'kind':'steps','run':'r','time':20,'rank':0,'epoch':1,'step':5,'losses':[[5,0.1]],'rows':50,'of':100,'loss':0.6");
    assertEquals(0.6, run.summary().get("loss").asDouble(), 0);
    tell(
        "'kind':'steps','run':'r','time':22,'rank':0,'epoch':1,'step':9,'losses':[[9,0.1]],'rows':90,'of':100,'loss':0.5",
        "'kind':'epoch','run':'r','time':22.1,'row':{'epoch':1,'loss':0.4,'val_loss':0.7,'rows':100}");
    assertEquals(20, run.summary().get("rowsPerSecond").asDouble(), 1e-9);
    tell(Told.end("r", 23, "finished"));
    JsonNode ended = run.summary();
    assertEquals(90 / 12.1, ended.get("rowsPerSecond").asDouble(), 1e-6);
    assertEquals(0.4, ended.get("loss").asDouble(), 0);
    assertEquals(0.7, ended.get("valLoss").asDouble(), 0);
  }

  @Test
  public void nonsenseIsNoFailure() {
    tell(
        "'kind':'steps','run':'r','losses':[[1,null],['x'],{}],'step':'seven','rows':'many'",
        "'kind':'rank','run':'r','rank':-1,'seconds':7",
        "'kind':'epoch','run':'r','row':[1,2]",
        "'kind':'submission','run':'r','hosts':{'a':1}",
        "'kind':'from the future','run':'r'",
        "'run':'r'");
    assertEquals("running", run.detail().get("state").asText());
  }
}
